#!/usr/bin/env bash
# Secure shell between the containers of compose.yaml, for an ordinary user: port 2222, keys in ~/.ssh, a volume that they share.
#
#   docker/ssh.sh keys     make the keys of users and hosts, unless they are there
#   docker/ssh.sh serve    let the other containers in, until this one is stopped
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

folder=$HOME/.ssh
port=2222

make_keys() {
    [ ! -f "$folder/config" ] || return 0
    for name in id_ed25519 host_key; do ssh-keygen -q -t ed25519 -N "" -C "" -f "$folder/$name"; done
    cp "$folder/id_ed25519.pub" "$folder/authorized_keys"
    # All hosts have one key, and no other key is trusted.
    printf '* %s\n' "$(cat "$folder/host_key.pub")" >"$folder/known_hosts"
    printf 'Port %s\nBatchMode yes\nStrictHostKeyChecking yes\nLogLevel ERROR\n' "$port" >"$folder/config"
}

# Without the system's configuration, which expects root.
serve() { exec /usr/sbin/sshd -D -e -f /dev/null -p "$port" -h "$folder/host_key" -o PidFile=none -o PasswordAuthentication=no; }

case ${1:-} in
    keys) make_keys ;;
    serve) serve ;;
    *) die "the argument must be 'keys' or 'serve', got '${1:-}'" ;;
esac
