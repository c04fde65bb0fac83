"""Build the distributions, and use them as their users do, each extra alone in an environment of its own: make package.

python ci/distributions.py [NAME...]     of: torch, ddp, tensorflow, numpy, source (default: all)

Every environment is new and outside of the checkout, and what is tested there is what was installed, where there is no
compiler: first that nothing else of ours and no other framework is there, then the tests of the core and of its adapter, then
that two workers train. "source" installs the source distribution, which then has no compiled kernels; the others install the
wheel. Horovod is the wheel that tools/build_horovod.sh made for the environment that runs this, with one framework or both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "_native.*", "*.o", "*-output")
MPI4PY = ("-m", "mpi4py")
COMPRESSORS = sorted(path.stem.removeprefix("test_") for path in (ROOT / "tests" / "compressors").glob("test_*.py"))
CORE = (
    # Those of two need PyTorch.
    *(f"compressors/{name}" for name in COMPRESSORS if name not in ("draws", "registry")),
    *("core/dense", "core/feedback", "core/layout", "core/state", "core/statistics", "core/step"),
    *("estimation/controllers", "estimation/fits", "exchange/cost", "exchange/wire", "kernels/ops", "kernels/tracked"),
)
"""Tests that need none of the frameworks, and run over the array operations of those that are there."""


@dataclass(frozen=True)
class Installation:
    """An environment with some extras, and what is run there."""

    extras: str
    modules: tuple[str, ...]
    """The frameworks that are there; no other is."""
    tests: tuple[str, ...]
    """Of its own adapter."""
    command: tuple[str, ...]
    """What an example trains with, as arguments of Python."""
    compiled: bool = True
    """Whether it has the kernels, which the wheel has; else it is installed from the source distribution."""
    launched: bool = False
    """Whether the command must be started on two workers; else it starts them itself."""


INSTALLATIONS = {
    "torch": Installation(
        "torch,horovod,bench",
        ("torch", "horovod"),
        ("kernels/pool", "ops/protocol", "compressors/draws", "torch/seam", "torch/compressors"),
        ("examples/demo.py", "--framework", "torch", "--epochs", "1"),
    ),
    "ddp": Installation(
        "torch,bench",
        ("torch",),
        ("torch/hook", "kernels/pool", "ops/protocol"),
        ("examples/demo.py", "--transport", "ddp", "--epochs", "1"),
    ),
    "tensorflow": Installation(
        "tensorflow-cpu,horovod,bench",
        ("tensorflow", "keras", "horovod"),
        ("tensorflow/host", "tensorflow/seam"),
        ("examples/demo.py", "--framework", "tensorflow", "--epochs", "1"),
    ),
    "numpy": Installation(
        "mpi,bench",
        ("mpi4py",),
        ("numpy/allreduce",),
        (*MPI4PY, "examples/numpy_logistic.py", "--epochs", "1"),
        launched=True,
    ),
}
INSTALLATIONS["source"] = replace(INSTALLATIONS["numpy"], compiled=False)
ALL_MODULES = ("torch", "tensorflow", "keras", "horovod", "mpi4py")

INSPECTION = f"""
import importlib.util, pathlib, sys
import horovod_sparse, horovod_sparse.kernels
folder = pathlib.Path(horovod_sparse.__file__).parent
assert folder.is_relative_to(sys.prefix), f"the wheel must be what is imported, got {{folder}}"
assert (folder / "py.typed").is_file()
print(bool(horovod_sparse.kernels.variants()), *(name for name in {ALL_MODULES} if importlib.util.find_spec(name)))
"""


def say(text: str) -> None:
    print(f"distributions: {text}", flush=True)


def run(*command: str | Path, cwd: Path, environment: dict[str, str]) -> str:
    """Standard output of a command; ends everything if it fails."""
    parts = [str(part) for part in command]
    done = subprocess.run(parts, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\n{' '.join(parts)}\nended with exit status {done.returncode}")
    return done.stdout


def clean_environment(constraints: Path) -> dict[str, str]:
    """That of this process, with nothing that leads to the checkout, and the pinned versions."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**environment, "PIP_CONSTRAINT": str(constraints), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def check_contents(names: set[str], kind: str) -> None:
    """What must be in a distribution and what must not; names are relative to its root."""
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "horovod_sparse").rglob("*.py")}
    wanted |= {"horovod_sparse/py.typed", "horovod_sparse/kernels/kernels.h"}
    if kind == "sdist":
        wanted |= {"horovod_sparse/kernels/kernels.cpp", "setup.py", "pyproject.toml", "README.md", "LICENSE"}
    else:
        assert any("kernels/_native." in name for name in names), "the wheel must hold the compiled kernels"
        assert any(name.endswith("licenses/LICENSE") for name in names), "the wheel must hold the license"
    assert wanted <= names, f"the {kind} lacks {sorted(wanted - names)}"
    of_checkout = ("benchmarks/", "ci/", "docker/", "examples/", "studies/", "tests/", "tools/")
    strange = [
        name for name in names if name.startswith(of_checkout) or "__pycache__" in name or name.endswith((".o", ".pyc"))
    ]
    assert not strange, f"the {kind} must not hold {strange}"


def build(folder: Path, environment: dict[str, str]) -> dict[bool, Path]:
    """The source distribution, built from a clean copy of the checkout, and the wheel, built from it; by `compiled`."""
    shutil.copytree(ROOT, folder / "source", ignore=LEFT_OUT)
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", cwd=folder / "source", environment=environment)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        check_contents({name.partition("/")[2] for name in archive.getnames()}, "sdist")
    with zipfile.ZipFile(wheel) as archive:
        check_contents(set(archive.namelist()), "wheel")
    # What the wheel needs of the system, and how old that may be, is in the name that it gets here.
    tools = {**environment, "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])}
    run("auditwheel", "repair", "--wheel-dir", folder / "repaired", wheel, cwd=folder, environment=tools)
    (wheel,) = (folder / "repaired").glob("*-abi3-manylinux_*.whl")
    say(f"{sdist.name} and, from it, {wheel.name} hold what they should")
    return {False: sdist, True: wheel}


def find_horovod(folder: Path, environment: dict[str, str]) -> Path:
    command = (ROOT / "tools" / "build_horovod.sh", "--wheel-only", sys.executable)
    return Path(run(*command, cwd=folder, environment=environment).splitlines()[-1]).parent


def start_two() -> list[str]:
    """The command that starts two workers here."""
    sys.path.insert(0, str(ROOT / "examples"))
    from demo import launcher

    command: list[str] = launcher(2)
    return command


def check_installation(
    name: str, built: dict[bool, Path], horovod: Path, folder: Path, environment: dict[str, str]
) -> None:
    """Install a distribution with its extras, in an environment that is removed again, and run tests and an example."""
    installation, venv = INSTALLATIONS[name], folder / name
    # Beside the tests and the examples there is no package that they could find.
    for part in ("tests", "examples"):
        shutil.copytree(ROOT / part, folder / part, ignore=LEFT_OUT, dirs_exist_ok=True)
    # It asks for Triton, which is for tests of GPU kernels and not among what users on CPUs have.
    (folder / "tests" / "conftest.py").unlink()
    shutil.copy(ROOT / "pyproject.toml", folder)
    run(sys.executable, "-m", "venv", venv, cwd=folder, environment=environment)
    python = venv / "bin" / "python"
    # "test" would bring linters; the tests need no more than these.
    chosen = built[installation.compiled]
    wanted = (f"{chosen}[{installation.extras}]", "pytest", "hypothesis", "--find-links", str(horovod))
    no_compiler = {**environment, "CC": "false", "CXX": "false"}
    run(python, "-m", "pip", "install", "--quiet", *wanted, cwd=folder, environment=no_compiler)
    compiled, *found = run(python, "-c", INSPECTION, cwd=folder, environment=environment).split()
    assert compiled == str(installation.compiled), f"{name}: expected compiled kernels: {installation.compiled}"
    assert sorted(found) == sorted(installation.modules), f"{name}: expected {installation.modules} alone, got {found}"
    # What `cached` is about are notes of the kernels.
    core = [test for test in CORE if installation.compiled or test != "kernels/tracked"]
    tests = [f"tests/{test.replace('/', '/test_')}.py" for test in (*core, *installation.tests)]
    # Without conftest.py, hypothesis would take an example for wrong that a busy machine takes long for.
    pytest = ("-m", "pytest", "-q", "--hypothesis-profile", "ci")
    print(run(python, *pytest, *tests, cwd=folder, environment=environment).splitlines()[-1], flush=True)
    start = start_two() if installation.launched else []
    print(run(*start, python, *installation.command, cwd=folder, environment=environment), flush=True)
    shutil.rmtree(venv)


def main() -> None:
    names = sys.argv[1:] or list(INSTALLATIONS)
    unknown = sorted(set(names) - set(INSTALLATIONS))
    if unknown:
        raise SystemExit(f"the arguments must be of {', '.join(INSTALLATIONS)}, got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="distributions-") as created:
        folder = Path(created)
        shutil.copy(ROOT / "constraints.txt", folder)
        environment = clean_environment(folder / "constraints.txt")
        built = build(folder, environment)
        horovod = find_horovod(folder, environment)
        for name in names:
            started = time.perf_counter()
            check_installation(name, built, horovod, folder, environment)
            say(f"{name} alone: installed, tested, trained, in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
