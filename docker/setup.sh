#!/usr/bin/env bash
# Make .venv, the virtual environment with everything that this repository needs. Does nothing when that is done already.
#
#   docker/setup.sh
#
#   PYTHON        interpreter for a new .venv (default: the first of python3.11, 3.12, 3.10, python3 that is 3.10 to 3.12)
#   FRAMEWORKS    "torch tensorflow" or "torch" (default: as last time, at first "torch tensorflow")
#   HOROVOD_GPU   1 builds Horovod with NCCL, 0 without (default: as last time, at first 0)
#   PIP_...       pip's own settings, such as another index for CPU builds of torch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source docker/common.sh

venv=.venv
stamp=$venv/.setup
log=$venv/setup.log
inputs=(constraints.txt setup.py docker/*.sh horovod_sparse/kernels/*.{py,cpp,h})

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3}; do
        if suits "$candidate"; then command -v "$candidate"; return; fi
    done
    return 1
}

# A half-made environment, or one whose interpreter was removed, is made anew.
make_venv() {
    local python
    python=$(find_python) || die "no Python 3.10 to 3.12 found (tried: ${PYTHON:-python3.11 python3.12 python3.10 python3});" \
        "install one, or name one with PYTHON="
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
}

install_packages() {
    # Relative, because pip splits this variable at blanks.
    export PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
    local pip=("$venv/bin/python" -m pip install) wanted=${frameworks/tensorflow/tensorflow-cpu}
    : >"$log"
    step "$log" "installing $wanted" "${pip[@]}" setuptools wheel $wanted
    # The Keras before 3, for tests. Without its dependencies: it asks for the "tensorflow" that brings CUDA.
    [[ $frameworks != *tensorflow* ]] || step "$log" "installing tf-keras" "${pip[@]}" --no-deps tf-keras
    # For tests, which interpret its kernels; the version that torch asks for where it is built for a GPU. Apart: where it is found,
    # torch imports it by and by, and a process that has imported TensorFlow before that crashes.
    step "$log" "installing triton" "${pip[@]}" --no-deps --upgrade --target "$venv/triton" triton
    guard docker/build_horovod.sh "$venv/bin/python"
    step "$log" "installing horovod_sparse, editable" "${pip[@]}" --no-build-isolation -e ".[torch,mpi,test,bench]"
}

# Sets `frameworks`, HOROVOD_GPU and `new`, what the stamp will say: a hash of the inputs, the GPU flag, the frameworks.
read_settings() {
    local old=()
    [ ! -f "$stamp" ] || mapfile -t old <"$stamp"
    frameworks=${FRAMEWORKS:-${old[2]:-torch tensorflow}}
    export HOROVOD_GPU=${HOROVOD_GPU:-${old[1]:-0}}
    new=$(cat "${inputs[@]}" | sha256sum | cut -c1-16)$'\n'$HOROVOD_GPU$'\n'$frameworks
}

check_settings() {
    case $frameworks in
        "torch tensorflow" | torch) ;;
        *) die "FRAMEWORKS must be 'torch tensorflow' or 'torch', got '$frameworks'" ;;
    esac
    case $HOROVOD_GPU in
        0 | 1) ;;
        *) die "HOROVOD_GPU must be 0 or 1, got '$HOROVOD_GPU'" ;;
    esac
    [ -n "${PYTHON:-}" ] || return 0
    suits "$PYTHON" || die "PYTHON must be a Python 3.10 to 3.12, got '$PYTHON' ($("$PYTHON" --version 2>&1 || true))"
    [ ! -x $venv/bin/python ] || [ "$("$PYTHON" --version)" = "$($venv/bin/python --version)" ] ||
        die "PYTHON is $("$PYTHON" --version) but $venv was made with $($venv/bin/python --version): run 'make clean' first"
}

main() {
    read_settings
    check_settings
    if [ -x $venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$new" ]; then return; fi
    rm -f "$stamp"
    docker/system_packages.sh "$(find_python || true)"
    $venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv
    suits $venv/bin/python || die "$venv is $($venv/bin/python --version), 3.10 to 3.12 is needed: run 'make clean' first"
    install_packages
    printf '%s\n' "$new" >"$stamp"
    say "done; $venv/bin/horovod-sparse check says what this machine can do"
}

# One line with its exit, because bash reads on in a file that was replaced while it ran.
main; exit
