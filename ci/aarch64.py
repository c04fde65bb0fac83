"""The tests of the kernels on AArch64, emulated: make aarch64. Debian only, as root; some minutes.

    python ci/aarch64.py [ARGUMENTS OF PYTEST]

The kernels are cross-compiled; a Python of Debian's for AArch64, which is unpacked and not installed, runs the tests with
wheels of the package index under qemu-user. That shows what the kernels compute, not how fast they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "aarch64"
PYTHON = f"python3.{sys.version_info.minor}"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
TOOLS = ("g++-aarch64-linux-gnu", "qemu-user")
FOREIGN = (
    *(f"{PYTHON}-minimal", f"lib{PYTHON}-minimal", f"lib{PYTHON}-stdlib"),
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libffi8", "libbz2-1.0", "liblzma5", "libuuid1"),
)
WHEELS = ("numpy", "scipy", "cffi", "pytest", "pytest-xdist", "hypothesis")
TESTS = ("tests/kernels/test_ops.py", "tests/kernels/test_variants.py")


def run(command: Sequence[object], folder: Path = ROOT) -> None:
    """Raises CalledProcessError unless the command succeeds."""
    subprocess.run([str(word) for word in command], check=True, cwd=folder)


def install_tools() -> None:
    if not (shutil.which(COMPILER) and shutil.which(EMULATOR)):
        run(["apt-get", "update", "-qq"])
        run(["apt-get", "install", "-qq", "--no-install-recommends", *TOOLS])


def unpack_python(system: Path) -> None:
    """Debian's packages for AArch64, found by lists of their own: those of this system stay as they are."""
    if (system / "usr" / "bin" / PYTHON).exists():
        return
    state, packages = BUILD / "apt", BUILD / "packages"
    for folder in (state / "lists" / "partial", state / "cache" / "archives" / "partial", packages):
        folder.mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::State": state,
        "Dir::State::Lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
    }
    apt = ["apt-get", "-qq", *(part for name, value in settings.items() for part in ("-o", f"{name}={value}"))]
    run([*apt, "update"])
    run([*apt, "download", *FOREIGN], packages)
    for package in sorted(packages.glob("*.deb")):
        run(["dpkg-deb", "--extract", package, system])


def install_wheels(site: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    platforms = [part for glibc in (17, 27, 28, 34) for part in ("--platform", f"manylinux_2_{glibc}_aarch64")]
    platforms += ["--platform", "manylinux2014_aarch64"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--only-binary",
        ":all:",
        "--target",
        site,
        *platforms,
    ]
    # The same releases as here.
    run([*command, "--python-version", version, "--constraint", ROOT / "constraints.txt", "--upgrade", *WHEELS])


def compile_kernels(package: Path) -> None:
    """The package, with kernels for AArch64 in place of this machine's."""
    sys.path.insert(0, str(ROOT))
    from horovod_sparse.kernels import build

    left_out = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "horovod_sparse", package, ignore=left_out, dirs_exist_ok=True)
    kernels = package / "kernels"
    source = BUILD / "_native.cpp"
    build.ffibuilder.emit_c_code(str(source))
    flags = [*build.COMPILE, *build.LINK, "-DPy_LIMITED_API=0x030a0000"]
    places = ["-I", kernels, "-I", sysconfig.get_path("include")]
    sources = [source, kernels / "kernels.cpp"]
    run([COMPILER, "-shared", "-fPIC", *flags, *places, *sources, "-o", kernels / "_native.abi3.so"])


def main(arguments: list[str]) -> int:
    if not shutil.which("dpkg-deb"):
        print("this needs Debian: its packages are what is emulated")
        return 2
    system, site, tree = BUILD / "system", BUILD / "site", BUILD / "tree"
    BUILD.mkdir(parents=True, exist_ok=True)
    install_tools()
    unpack_python(system)
    install_wheels(site)
    compile_kernels(tree / "horovod_sparse")
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", tree)
    environment = {
        "PYTHONPATH": f"{tree}:{site}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOROVOD_SPARSE_KERNELS": "neon",
        "HOME": os.environ.get("HOME", "/"),
    }
    python = [EMULATOR, "-L", system, system / "usr" / "bin" / PYTHON]
    command = [*python, "-m", "pytest", "-q", "-m", "not full", "-p", "no:cacheprovider", *TESTS, *arguments]
    return subprocess.run([str(word) for word in command], cwd=tree, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
