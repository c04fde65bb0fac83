#!/usr/bin/env bash
# Install the system packages that are missing: an MPI with its compiler wrappers, a C++ compiler, make, Python's headers.
#
#   docker/system_packages.sh [--python-only] [PYTHON]
#   docker/system_packages.sh --browser
#
#   --python-only   only what virtual environments need: nothing will be compiled
#   --browser       only what opens the site of `make docs`: Debian's chromium, if no browser of its kind is there
#   PYTHON          the interpreter that the virtual environment will use; without it, Python itself counts as missing
#
# Needs no root when nothing is missing. Knows apt (Debian, Ubuntu); elsewhere it says what to install.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

has() { command -v "$1" >/dev/null; }

# missing_for_python PYTHON: print the packages without which PYTHON can neither make environments nor compile extensions.
missing_for_python() {
    "$1" - <<'PY'
import importlib.util
import pathlib
import sys
import sysconfig

name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
missing = []
if not importlib.util.find_spec("ensurepip") or not importlib.util.find_spec("venv"):
    missing.append(f"{name}-venv")
if not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file():
    missing.append(f"{name}-dev")
if missing and sys.base_prefix != "/usr":
    sys.exit(f"{sys.executable} lacks what Debian packages as {' '.join(missing)}, and no package manager owns it: reinstall it "
             "with these parts, or name another interpreter with PYTHON=")
print("\n".join(missing))
PY
}

list_missing() {
    local python_only=
    if [ "${1:-}" = --browser ]; then
        has chromium || has chromium-browser || has google-chrome || echo chromium
        return
    fi
    if [ "${1:-}" = --python-only ]; then python_only=1; shift; fi
    if [ -n "$python_only" ]; then
        if [ -z "${1:-}" ]; then printf '%s\n' python3 python3-venv; else missing_for_python "$1" | grep -v -e '-dev$' || true; fi
        return
    fi
    has "${CXX:-g++}" || echo g++
    has make || echo make
    has mpirun || echo openmpi-bin
    has mpicxx || echo libopenmpi-dev
    if [ -n "${1:-}" ]; then missing_for_python "$1"; else printf '%s\n' python3 python3-venv python3-dev; fi
}

main() {
    local missing as_root=()
    missing=$(list_missing "$@" | xargs)
    [ -n "$missing" ] || return 0
    has apt-get || die "please install what Debian calls: $missing (there is no apt-get here to do it)"
    if [ "$(id -u)" != 0 ]; then
        has sudo || die "please run as root: apt-get install $missing (there is no sudo here to do it)"
        as_root=(sudo)
    fi
    say "installing $missing"
    { "${as_root[@]}" apt-get update -qq &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing; } >&2 ||
        die "could not install: $missing; please install these packages and run this again"
}

# One line with its exit, because bash reads on in a file that was replaced while it ran.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then main "$@"; exit; fi
