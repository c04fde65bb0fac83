# shellcheck shell=bash
# Shared by the scripts of this folder; sourced, not run. Everything is said on standard error: standard output is for machines.

program=$(basename "$0" .sh)
say() { printf '%s: %s\n' "$program" "$*" >&2; }
die() { say "$*"; exit 1; }

# suits PYTHON NEWEST: whether an interpreter is Python 3.10 to 3.NEWEST.
suits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, int(sys.argv[1])))' "$2" 2>/dev/null; }

running=""
stop_running() {
    [ -n "$running" ] || return 0
    kill -TERM -- "-$running" 2>/dev/null || true
    for _ in $(seq 50); do kill -0 -- "-$running" 2>/dev/null || break; sleep 0.1; done
    kill -KILL -- "-$running" 2>/dev/null || true
    running=""
}
interrupted() { stop_running; say "interrupted"; exit "$1"; }
trap 'interrupted 130' INT
trap 'interrupted 143' TERM HUP

# start COMMAND...: run COMMAND in the background, in a process group of its own. Background jobs of a script ignore
# Ctrl-C: without the group and the traps above, compilers would outlive an interrupted build.
start() { set -m; "$@" </dev/null & running=$!; set +m; }
finish() { local status=0; wait "$running" || status=$?; running=""; return "$status"; }
guard() { start "$@"; finish; }

# step LOG TEXT COMMAND...: run COMMAND into LOG; say TEXT at once, how far it is every half minute, and LOG's end when it fails.
step() {
    local log=$1 text=$2 began=$SECONDS next=30; shift 2
    say "$text"
    start "$@" >>"$log" 2>&1
    while kill -0 "$running" 2>/dev/null; do
        sleep 0.5
        if ((SECONDS - began >= next)); then
            say "  ... $next s $(grep -oE '\[ *[0-9]+%\]' "$log" | tail -n 1 || true)"
            next=$((next + 30))
        fi
    done
    finish || { tail -n 25 "$log" >&2; die "failed while $text; the whole log is $log"; }
}
