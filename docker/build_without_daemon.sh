#!/usr/bin/env bash
# Build the CPU image where there is no Docker daemon, check it, and remove it again.
#
#   docker/build_without_daemon.sh [ARGUMENTS OF PYTEST]
#
#   ARGUMENTS       which tests to run, such as "tests/exchange/test_wire.py" or "-k seam" (default: all, about half an hour)
#   BASE            a base image from a registry (default: one that debootstrap makes of Debian 12's packages)
#   BUILD_OPTIONS   more options for the build, the same as Docker's; cpu.Dockerfile says which there are
#   OUTPUT          a file for the image, which `docker load` and apptainer read (default: the image is not kept)
#   STORAGE         a new folder for 30 GB of images (default: in /tmp)
#
# Needs root, and of Debian's packages buildah, iproute2 and, unless BASE is given, debootstrap. debootstrap installs a minimal
# Debian, buildah builds docker/cpu.Dockerfile on it in chroots, and then, in a container and as the image's user, these are
# run: `make lint types`, the tests, `make demo`, and the four hosts of docker/compose.yaml, as network namespaces without a way
# out. At the end, however it comes, everything but OUTPUT and the log is removed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source docker/common.sh

image=localhost/horovod_sparse:cpu
chroots=(--isolation chroot --network host)
namespaces=()
servers=()

check() {
    local needed
    [ "$(id -u)" = 0 ] || die "this needs root, because it makes chroots and network namespaces"
    for needed in buildah ip $([ -n "${BASE:-}" ] || echo debootstrap); do
        command -v "$needed" >/dev/null || die "no $needed: install it (Debian: apt-get install buildah iproute2 debootstrap)"
    done
    [ -z "${STORAGE:-}" ] || [ ! -e "$STORAGE" ] || die "STORAGE must be a new folder, but $STORAGE is there"
}

make_storage() {
    storage=${STORAGE:-$(mktemp -d "${TMPDIR:-/tmp}/horovod_sparse.XXXXXX")}
    mkdir -p "$storage"
    buildah=(buildah --storage-driver vfs --root "$storage/images" --runroot "$storage/run")
    trap clean_up EXIT
    # In a new folder: nobody else can have put a link to another file in its place.
    log=$(mktemp -d "${TMPDIR:-/tmp}/build_without_daemon.XXXXXX")/log
    say "images are kept in $storage for the time being; the log is $log"
}

clean_up() {
    local one
    stop_running
    for one in "${servers[@]}"; do kill -TERM -- "-$one" 2>/dev/null || true; done
    for one in "${namespaces[@]}"; do ip netns delete "$one"; done
    "${buildah[@]}" rm --all >/dev/null 2>&1 || true
    rm -rf --one-file-system "$storage"
    say "removed $storage"
}

make_base() {
    local container root
    container=$("${buildah[@]}" from scratch)
    root=$("${buildah[@]}" mount "$container")
    step "$log" "installing a minimal Debian 12" debootstrap --variant=minbase bookworm "$root"
    BASE=localhost/debian:12
    step "$log" "making the base image" "${buildah[@]}" commit --rm "$container" "$BASE"
}

build() {
    local options
    read -ra options <<<"${BUILD_OPTIONS:-}"
    step "$log" "building the image" "${buildah[@]}" build "${chroots[@]}" --build-arg BASE="$BASE" "${options[@]}" \
        --file docker/cpu.Dockerfile --tag "$image" .
    container=$("${buildah[@]}" from "$image")
}

# inside COMMAND...: run COMMAND in the container, as the image's user, with its output shown.
inside() {
    say "running $*"
    # By any other name the container could not find itself, and horovodrun looks for its host's address.
    guard "${buildah[@]}" run "${chroots[@]}" --hostname localhost "$container" -- "$@"
}

# compose KEYS: print the items below these keys of docker/compose.yaml, one a line.
compose() {
    "${buildah[@]}" run "${chroots[@]}" "$container" -- .venv/bin/python -c \
        "import yaml; print(*yaml.safe_load(open('docker/compose.yaml'))$1, sep='\n')"
}

add_namespace() { ip netns add "$1" && namespaces+=("$1"); }

# Sets `hosts`, and makes a namespace for each and one with the bridge that joins them; nothing leads out of these.
join_hosts() {
    local host number=1
    mapfile -t hosts < <(compose "['services']" | grep -v '^keys$')
    echo "127.0.0.1 localhost" >"$storage/hosts"
    add_namespace "$$-bridge"
    ip -n "$$-bridge" link add bridge up type bridge
    for host in "${hosts[@]}"; do
        add_namespace "$$-$host"
        ip -n "$$-$host" link set lo up
        ip -n "$$-$host" link add eth0 type veth peer name "$host" netns "$$-bridge"
        ip -n "$$-$host" address add "10.0.0.$number/24" dev eth0
        ip -n "$$-$host" link set eth0 up
        ip -n "$$-bridge" link set "$host" up master bridge
        echo "10.0.0.$number $host" >>"$storage/hosts"
        number=$((number + 1))
    done
}

# on HOST COMMAND...: run COMMAND in the container, with HOST's network and name.
on() {
    local host=$1; shift
    ip netns exec "$$-$host" "${buildah[@]}" run "${chroots[@]}" --hostname "$host" --volume "$storage/hosts:/etc/hosts:ro" \
        "$container" -- "$@"
}

# What `docker compose run head` does.
train_on_hosts() {
    local host command
    join_hosts
    mapfile -t command < <(compose "['services']['head']['command']")
    on head docker/ssh.sh keys
    for host in "${hosts[@]}"; do
        set -m; on "$host" docker/ssh.sh serve </dev/null >>"$log" 2>&1 & servers+=("$!"); set +m
        on "$host" timeout 30 bash -c 'until : </dev/tcp/localhost/2222; do sleep 0.2; done' 2>>"$log"
    done
    say "running ${command[*]}"
    guard on head "${command[@]}"
}

main() {
    check
    make_storage
    [ -n "${BASE:-}" ] || make_base
    build
    say "the image is there after $SECONDS s"
    inside make lint types
    inside .venv/bin/python -m pytest "$@"
    inside make demo
    train_on_hosts
    [ -z "${OUTPUT:-}" ] || step "$log" "writing $OUTPUT" "${buildah[@]}" push "$image" "docker-archive:$OUTPUT:$image"
    say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
}

# One line with its exit, because bash reads on in a file that was replaced while it ran.
main "$@"; exit
