#!/usr/bin/env bash
# Make .venv, the virtual environment with everything that this repository needs. Does nothing when that is done already.
#
#   docker/setup.sh [demo | ddp | frameworks | horovod]
#
#   demo          what `make demo` needs is enough: a new environment gets PyTorch alone, and the next full set-up adds the rest
#   ddp           what `make demo-ddp` needs is enough: the same without Horovod, and kernels are compiled if a compiler is there
#   frameworks    stop when PyTorch and TensorFlow are there, horovod: when Horovod is too; stages of cpu.Dockerfile
#   PYTHON        interpreter for a new .venv: 3.10 to 3.13, or 3.14 without TensorFlow (default: the first of the candidates below)
#   FRAMEWORKS    "torch tensorflow" or "torch" (default: as last time, at first "torch tensorflow")
#   TORCH, TENSORFLOW   other releases than those in constraints.txt; what they bring along is then not pinned
#   HOROVOD_GPU   1 builds Horovod with NCCL, 0 without (default: as last time, at first 0)
#   PIP_...       pip's own settings, such as another index for CPU builds of torch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source docker/common.sh

venv=.venv
stamp=$venv/.setup
log=$venv/setup.log
pins=$venv/constraints.txt
demo_only="torch, for the demo"
ddp_only="torch, without Horovod"
candidates=(python3.11 python3.12 python3.10 python3.13 python3.14 python3)
inputs=(setup.py pyproject.toml tools/build_horovod.sh docker/{common,system_packages,setup}.sh horovod_sparse/kernels/*.{py,cpp,h})

find_python() {
    local candidate
    for candidate in ${PYTHON:-"${candidates[@]}"}; do
        if suits "$candidate" "$(newest)"; then command -v "$candidate"; return; fi
    done
    return 1
}

# Print the minor version of the newest Python that the frameworks publish wheels for.
newest() { if [[ $frameworks == *tensorflow* ]]; then echo 13; else echo 14; fi; }

# Print which interpreters can be used.
wanted_python() {
    if [ "$(newest)" = 14 ]; then echo "Python 3.10 to 3.14"; else echo "Python 3.10 to 3.13 (FRAMEWORKS=torch: to 3.14)"; fi
}

# A half-made environment, or one whose interpreter was removed, is made anew.
make_venv() {
    local python
    python=$(find_python) || die "no $(wanted_python) found (tried: ${PYTHON:-${candidates[*]}});" \
        "install one, or name one with PYTHON="
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
}

# Print the versions to install: constraints.txt, or what of it holds for other releases of the frameworks.
choose_pins() {
    if [ -z "${TORCH:-}${TENSORFLOW:-}" ]; then cat constraints.txt; return; fi
    sed -E -e '/^numpy==/d' -e '/^# Brought in by the above/,$d' \
        ${TORCH:+-e "s/^torch==.*/torch==$TORCH/" -e '/^triton==/d'} \
        ${TENSORFLOW:+-e "s/^tensorflow-cpu==.*/tensorflow-cpu==$TENSORFLOW/"} \
        constraints.txt
}

# Relative, because pip splits this variable at blanks.
export PIP_CONSTRAINT=$pins PIP_DISABLE_PIP_VERSION_CHECK=1
pip=("$venv/bin/python" -m pip install)

install_frameworks() {
    local wanted=${frameworks%%,*}
    wanted=${wanted/tensorflow/tensorflow-cpu}
    choose_pins >"$pins"
    : >"$log"
    # What the package is built with is there first: without cffi its kernels would be left out.
    step "$log" "installing $wanted" "${pip[@]}" setuptools wheel cffi $wanted
    # For tests, which interpret its kernels; the version that torch asks for where it is built for a GPU. Apart: where it is found,
    # torch imports it by and by, and a process that has imported TensorFlow before that crashes.
    is_partial || step "$log" "installing triton" "${pip[@]}" --no-deps --upgrade --target "$venv/triton" triton
}

is_partial() { [ "$frameworks" = "$demo_only" ] || [ "$frameworks" = "$ddp_only" ]; }

install_package() {
    local extras=torch,bench
    [ "$frameworks" = "$ddp_only" ] || extras+=,horovod,mpi
    is_partial || extras+=,test,docs
    step "$log" "installing horovod_sparse, editable" "${pip[@]}" --no-build-isolation -e ".[$extras]"
}

# read_settings UNTIL: set `frameworks` and HOROVOD_GPU, as they are asked for or as they were.
read_settings() {
    local old=()
    [ ! -f "$stamp" ] || mapfile -t old <"$stamp"
    frameworks=${FRAMEWORKS:-${old[2]:-$ddp_only}}
    case $1 in
        ddp) ;;
        demo) [ "$frameworks" != "$ddp_only" ] || frameworks=$demo_only ;;
        *) ! is_partial || frameworks="torch tensorflow" ;;
    esac
    export HOROVOD_GPU=${HOROVOD_GPU:-${old[1]:-0}}
}

# Print what the stamp says of a finished environment: a hash of the inputs, the GPU flag, the frameworks.
describe_settings() {
    { choose_pins; cat "${inputs[@]}"; } | sha256sum | cut -c1-16
    printf '%s\n' "$HOROVOD_GPU" "$frameworks"
}

check_settings() {
    case $1 in
        "" | demo | ddp | frameworks | horovod) ;;
        *) die "the only argument must be 'demo', 'ddp', 'frameworks' or 'horovod', got '$1'" ;;
    esac
    case $frameworks in
        "torch tensorflow" | torch | "$demo_only" | "$ddp_only") ;;
        *) die "FRAMEWORKS must be 'torch tensorflow' or 'torch', got '$frameworks'" ;;
    esac
    case $HOROVOD_GPU in
        0 | 1) ;;
        *) die "HOROVOD_GPU must be 0 or 1, got '$HOROVOD_GPU'" ;;
    esac
    [ -n "${PYTHON:-}" ] || return 0
    suits "$PYTHON" "$(newest)" ||
        die "PYTHON must be a $(wanted_python), got '$PYTHON' ($("$PYTHON" --version 2>&1 || true))"
    [ ! -x $venv/bin/python ] || [ "$("$PYTHON" --version)" = "$($venv/bin/python --version)" ] ||
        die "PYTHON is $("$PYTHON" --version) but $venv was made with $($venv/bin/python --version): run 'make clean' first"
}

main() {
    local until=${1:-} only
    read_settings "$until"
    check_settings "$until"
    if [ -f "$stamp" ] && [ -x $venv/bin/python ] && [ "$(cat "$stamp")" = "$(describe_settings)" ]; then return; fi
    rm -f "$stamp"
    if [ "$frameworks" = "$ddp_only" ]; then only=--python-only; else only=; fi
    docker/system_packages.sh $only "$(find_python || true)"
    $venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv
    suits $venv/bin/python "$(newest)" ||
        die "$venv is $($venv/bin/python --version), $(wanted_python) is needed: run 'make clean' first"
    install_frameworks
    [ "$until" != frameworks ] || return 0
    [ "$frameworks" = "$ddp_only" ] || guard tools/build_horovod.sh "$venv/bin/python"
    [ "$until" != horovod ] || return 0
    install_package
    describe_settings >"$stamp"
    say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s; $venv/bin/horovod-sparse check says what this machine can do"
}

# One line with its exit, because bash reads on in a file that was replaced while it ran.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then main "$@"; exit; fi
