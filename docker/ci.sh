#!/usr/bin/env bash
# Continuous integration in containers: build the image, then in it lint, types, tests, distributions, demonstrations, four hosts.
#
#   docker/ci.sh [OPTIONS OF docker build...]
#
#   PIP_EXTRA_INDEX_URL   an index with CPU builds of torch; without it torch brings several GB of CUDA's libraries along
#
# Needs Docker with Compose and nothing else, so any CI service can call it; ends with the first step that fails. The
# image and what has been built for it stay, for the next run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source docker/common.sh

image=horovod_sparse:cpu
# Shared memory, by which the workers in one container talk, is small unless asked for.
container=(docker run --rm --init --shm-size 1g --env PIP_EXTRA_INDEX_URL "$image")
compose=(docker compose --file docker/compose.yaml)

# part COMMAND...: run COMMAND, and say what it is and how long it took.
part() {
    local began=$SECONDS
    say "$*"
    guard "$@"
    say "done after $((SECONDS - began)) s"
}

part docker build --file docker/cpu.Dockerfile --tag "$image" --build-arg PIP_EXTRA_INDEX_URL "$@" .
part "${container[@]}" make test-all
part "${container[@]}" make package
part "${container[@]}" make demo demo-tensorflow
trap 'stop_running; "${compose[@]}" down --volumes' EXIT
part "${compose[@]}" run --rm --no-TTY head
