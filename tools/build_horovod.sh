#!/usr/bin/env bash
# Build a Horovod wheel for the frameworks of one Python environment, once, and install it there.
#
#   tools/build_horovod.sh [--wheel-only] [PYTHON]
#
#   PYTHON                the interpreter to build for (default: python3); torch and/or TensorFlow are installed there
#   --wheel-only          build (or find) the wheel and print its path, install nothing
#   HOROVOD_VERSION       release to build (default 0.28.1)
#   HOROVOD_SHA256        SHA-256 of that release's source distribution; that of 0.28.1 is known here. Another one is refused
#   HOROVOD_GPU           0: CPU only (default); 1: NCCL operations, needs nvcc and NCCL
#   HOROVOD_WHEEL_CACHE   where wheels and logs are kept (default ~/.cache/horovod_sparse)
#   HOROVOD_BUILD_JOBS    compilers at once (default: one per core, as far as 2 GiB of free memory each allow)
#
# Horovod's last release does not compile against current frameworks. This script downloads its source distribution
# through pip, applies the changes listed in `apply_changes`, and builds a wheel. Only standard output of --wheel-only is
# meant for machines; everything else is said on standard error.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../docker/common.sh"

# What the Python Package Index serves.
KNOWN_VERSION=0.28.1
KNOWN_SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0

# change FILE OLD NEW REASON: replace OLD by NEW in FILE; fail when OLD is not there exactly once.
change() {
    "$python" - "$@" <<'PY'
import pathlib
import sys

name, old, new, reason = sys.argv[1:]
path = pathlib.Path(name)
text = path.read_text()
found = text.count(old)
if found != 1:
    sys.exit(f"build_horovod: cannot change {name}: expected exactly one {old!r}, found {found} (the change is for: {reason})")
path.write_text(text.replace(old, new))
print(f"build_horovod:   {name}: {reason}", file=sys.stderr)
PY
}

# apply_changes FOLDER: adapt the unpacked source distribution in FOLDER.
apply_changes() {
    local cmake=$1/CMakeLists.txt torch_cmake=$1/horovod/torch/CMakeLists.txt tf_cmake=$1/horovod/tensorflow/CMakeLists.txt
    change "$cmake" 'set(CMAKE_CXX_STANDARD 14)' 'set(CMAKE_CXX_STANDARD 17)' \
        'the common sources include framework headers that need C++17'
    change "$1/setup.py" "'RelWithDebInfo'" "'Release'" 'debug information takes time to compile, and nobody reads it'
    change "$1/horovod/runner/js_run.py" 'from distutils.spawn import find_executable' \
        'from shutil import which as find_executable' 'Python 3.12 has no distutils, and horovodrun imports this file'
    change "$1/third_party/flatbuffers/include/flatbuffers/stl_emulation.h" 'const size_type count_;' 'size_type count_;' \
        'gcc >= 14 refuses the assignment to this constant in a template that nobody uses'
    if [ -n "$torch" ]; then
        change "$torch_cmake" 'set(CMAKE_CXX_STANDARD 14)' 'set(CMAKE_CXX_STANDARD 20)' \
            'the headers of PyTorch >= 2.10 need C++20'
        change "$torch_cmake" 'from distutils.sysconfig import get_python_inc; print(get_python_inc())' \
            'import sysconfig; print(sysconfig.get_path(\"include\"))' 'Python 3.12 has no distutils'
        release_gil "$1/horovod/torch/mpi_ops_v2.cc"
    fi
    if [ -n "$torch" ] && [ "$gpu" = 0 ]; then
        change "$1/cmake/Modules/FindPytorch.cmake" \
            'print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)' 'print(False)' \
            'HOROVOD_GPU=0 means CPU only, also where a CUDA build of torch finds a toolkit'
    fi
    if [ -n "$tensorflow" ]; then
        change "$tf_cmake" 'set(CMAKE_CXX_STANDARD 17)' 'set(CMAKE_CXX_STANDARD 20)' \
            'the headers of TensorFlow >= 2.20 need C++20'
        change "$tf_cmake" 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")' '' \
            'TensorFlow >= 2.19 ships no XLA headers; collectives inside XLA-compiled functions are lost, nothing else'
    fi
    if [ "$gpu" = 1 ]; then
        change "$1/horovod/common/ops/cuda/CMakeLists.txt" 'set(CMAKE_CUDA_STANDARD 11)' 'set(CMAKE_CUDA_STANDARD 17)' \
            'the standard library of gcc >= 14 is not compiled as C++11 by nvcc'
    fi
}

# release_gil FILE: let all functions of Horovod's binding for PyTorch run without the interpreter's lock.
#
# When a job ends, Horovod's thread frees the tensors of unfinished collectives while it holds a lock of its own. PyTorch 2.13
# takes the interpreter's lock to free a tensor that Python knows. A main thread that starts a collective at that moment holds the
# interpreter's lock and waits for Horovod's: the process never ends.
release_gil() {
    change "$1" 'PYBIND11_MODULE(mpi_lib_v2, m) {' 'struct Unlocked {
  py::module_& module;
  template <typename Function> void def(const char* name, Function function) {
    module.def(name, function, py::call_guard<py::gil_scoped_release>());
  }
};

PYBIND11_MODULE(mpi_lib_v2, module) {
  Unlocked m{module};' 'a collective that begins while another rank ends must not stop the process for ever'
    change "$1" '      py::gil_scoped_release release_python_gil;
' '' 'the lock is released already'
}

# distribution NAME...: print NAME-VERSION of the first of these that is installed, or nothing.
distribution() {
    "$python" - "$@" <<'PY'
import sys
from importlib import metadata

for name in sys.argv[1:]:
    try:
        print(f"{name}-{metadata.version(name)}")
        break
    except metadata.PackageNotFoundError:
        pass
PY
}

# Find out everything that a wheel depends on, and from it where that wheel is kept.
describe_wheel() {
    version=${HOROVOD_VERSION:-$KNOWN_VERSION}
    source_hash=${HOROVOD_SHA256:-}
    if [ -z "$source_hash" ] && [ "$version" = "$KNOWN_VERSION" ]; then source_hash=$KNOWN_SHA256; fi
    [ -z "$source_hash" ] || [[ $source_hash =~ ^[0-9a-f]{64}$ ]] ||
        die "HOROVOD_SHA256 must be 64 digits of 0-9 and a-f, got '$source_hash'"
    gpu=${HOROVOD_GPU:-0}
    cache=${HOROVOD_WHEEL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/horovod_sparse}
    [ "$gpu" = 0 ] || [ "$gpu" = 1 ] || die "HOROVOD_GPU must be 0 or 1, got '$gpu'"
    python=$(command -v "${1:-python3}") || die "no Python interpreter '${1:-python3}'"

    torch=$(distribution torch)
    tensorflow=$(distribution tensorflow tensorflow-cpu)
    [ -n "$torch$tensorflow" ] || die "neither torch nor TensorFlow is installed for $python; install one first"
    mpi=""
    if command -v mpicxx >/dev/null; then
        mpi=$(mpirun --version 2>/dev/null | head -n 1 | tr -cs 'A-Za-z0-9.\n' '-' || true)
        mpi=${mpi:-mpi}
    fi
    local compiler cuda="" script
    tag=$("$python" -c 'import sys, sysconfig; print(f"cp{sys.version_info[0]}{sys.version_info[1]}-{sysconfig.get_platform()}")')
    compiler=$("${CXX:-g++}" -dumpfullversion -dumpversion 2>/dev/null) ||
        die "no C++ compiler '${CXX:-g++}': install g++ (Debian and Ubuntu: apt-get install g++)"
    if [ "$gpu" = 1 ]; then
        cuda=$(PATH=$PATH:${HOROVOD_CUDA_HOME:-/usr/local/cuda}/bin nvcc --version 2>/dev/null | grep -oE 'V[0-9.]+$') ||
            die "HOROVOD_GPU=1 needs nvcc: install the CUDA toolkit, or set HOROVOD_CUDA_HOME to its folder"
    fi
    script=$(sha256sum "${BASH_SOURCE[0]}" | cut -c1-12)
    key=horovod-$version-$tag-${torch:-no_torch}-${tensorflow:-no_tensorflow}-gpu$gpu$cuda-${mpi:-no_mpi}-gcc$compiler-$script
    folder=$cache/$key
    log=$cache/$key.log
}

find_wheel() { [ ! -d "$folder" ] || find "$folder" -maxdepth 1 -name 'horovod-*.whl' -print -quit; }

default_jobs() {
    awk -v cores="$(nproc)" '/MemAvailable/ { jobs = int($2 / 2097152) }
        END { print (jobs < 1 ? 1 : jobs < cores ? jobs : cores) }' /proc/meminfo
}

# enable NAME VALUE: tell Horovod to require NAME when VALUE is not empty, and to leave NAME out otherwise.
enable() {
    unset "HOROVOD_WITH_$1" "HOROVOD_WITHOUT_$1"
    if [ -n "$2" ]; then export "HOROVOD_WITH_$1=1"; else export "HOROVOD_WITHOUT_$1=1"; fi
}

# prepare_environment: what Horovod's setup.py and CMake read. `step` runs its command in a subshell, so nothing leaks.
prepare_environment() {
    # setup.py asks for CMake on PATH. CMake >= 4 refuses the old policy versions of the third-party parts unless told.
    PATH=$(cd "$(dirname "$python")" && pwd):$PATH
    export PATH CMAKE_POLICY_VERSION_MINIMUM=3.5
    # gcc >= 13 no longer includes these headers by chance, and Horovod and Gloo rely on that.
    export CXXFLAGS="${CXXFLAGS:+$CXXFLAGS }-include cstdint -include stdexcept -include string"
    # A make that runs this script hands its own flags down; they are not meant for the compilation.
    unset MFLAGS MAKELEVEL MAKEOVERRIDES
    export MAKEFLAGS=-j${HOROVOD_BUILD_JOBS:-$(default_jobs)}
    # Horovod's own HOROVOD_GPU names a kind of GPU.
    unset HOROVOD_GPU HOROVOD_GPU_OPERATIONS HOROVOD_LOCAL_VERSION
    if [ "$gpu" = 1 ]; then export HOROVOD_GPU_OPERATIONS=NCCL; fi
    enable PYTORCH "$torch"
    enable TENSORFLOW "$tensorflow"
    enable MPI "$mpi"
    enable GLOO yes
    enable MXNET ""
}

# pip refuses a file with another hash before it runs anything of it.
download() {
    echo "horovod==$version${source_hash:+ --hash=sha256:$source_hash}" >"$work/requirements.txt"
    "$python" -m pip download --no-deps --no-binary horovod --no-build-isolation --dest "$work" -r "$work/requirements.txt" && return
    if grep -q 'DO NOT MATCH THE HASHES' "$log"; then
        say "the index serves a horovod-$version.tar.gz whose SHA-256 is not $source_hash; it was refused, and nothing of it was run"
    fi
    return 1
}

compile() {
    prepare_environment
    "$python" -m pip wheel --verbose --no-cache-dir --no-build-isolation --no-deps --wheel-dir "$work/wheel" "$work/horovod-$version"
}

build() {
    command -v make >/dev/null || die "no make: install it (Debian and Ubuntu: apt-get install make)"
    work=$(mktemp -d "${TMPDIR:-/tmp}/build-horovod.XXXXXX")
    # pip leaves its temporary folders behind when it is stopped; here they go with the rest.
    export TMPDIR=$work
    trap 'stop_running; rm -rf "$work" "$folder/.partial.$$"' EXIT
    : >"$log"
    say "building Horovod $version for $tag, ${torch:-no torch}, ${tensorflow:-no TensorFlow}, MPI: ${mpi:-no}, Gloo: yes, GPU: $gpu"
    say "this takes 2 to 5 minutes on 2 idle cores, once; the log is $log"

    # setuptools < 81, because Horovod's setup.py uses setup_requires.
    step "$log" "installing the build tools" "$python" -m pip install \
        "cmake>=3.25" "setuptools<81" wheel packaging cloudpickle psutil pyyaml cffi
    [ -n "$source_hash" ] || say "horovod-$version.tar.gz is not checked: set HOROVOD_SHA256 to its SHA-256"
    step "$log" "downloading the source distribution" download
    tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
    say "applying the changes"
    apply_changes "$work/horovod-$version"
    step "$log" "compiling" compile

    # A wheel appears in the cache whole or not at all.
    mkdir -p "$folder"
    cp "$work"/wheel/horovod-*.whl "$folder/.partial.$$"
    mv "$folder/.partial.$$" "$folder/$(basename "$work"/wheel/horovod-*.whl)"
    say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s; the wheel is kept in $folder"
}

# Hold the lock of this wheel, so that two set-ups at once build it once.
take_lock() {
    mkdir -p "$cache"
    exec 9>"$folder.lock"
    flock -n 9 || { say "waiting for another build of the same wheel"; guard flock 9; }
}

# pip takes a wheel of the installed version for installed, even if it was built for another framework: ask which it was.
is_installed() {
    "$python" - "$1" <<'PY'
import json
import pathlib
import sys
from importlib import metadata
from urllib.parse import unquote

try:
    origin = json.loads(metadata.distribution("horovod").read_text("direct_url.json") or "{}").get("url", "")
except metadata.PackageNotFoundError:
    origin = ""
sys.exit(unquote(origin) != unquote(pathlib.Path(sys.argv[1]).absolute().as_uri()))
PY
}

install_wheel() {
    if is_installed "$1"; then say "installed already: $1"; return; fi
    say "installing $1"
    guard "$python" -m pip install --quiet --force-reinstall --no-deps "$1" >&2
    guard "$python" -m pip install --quiet "$1" >&2
}

main() {
    local wheel_only=0 wheel
    if [ "${1:-}" = --wheel-only ]; then wheel_only=1; shift; fi
    describe_wheel "${1:-python3}"
    wheel=$(find_wheel)
    if [ -z "$wheel" ]; then
        take_lock
        wheel=$(find_wheel)
    fi
    if [ -z "$wheel" ]; then
        build
        wheel=$(find_wheel)
    fi
    if [ "$wheel_only" = 1 ]; then printf '%s\n' "$wheel"; else install_wheel "$wheel"; fi
}

# One line with its exit, because bash reads on in a file that was replaced while it ran.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then main "$@"; exit; fi
