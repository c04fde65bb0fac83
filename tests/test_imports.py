"""Which modules are imported by which, proved in subprocesses and by reading the sources."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import horovod_sparse

PACKAGE = Path(horovod_sparse.__file__).parent
TESTS = Path(__file__).parent
FRAMEWORKS = ("torch", "tensorflow", "keras", "horovod", "mpi4py")
CORE = sorted(
    path for path in [*PACKAGE.glob("*.py"), *PACKAGE.glob("compressors/*.py")] if path.stem not in ("cli", "probes")
)


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def loaded_frameworks(modules: str) -> str:
    # Triton is found where the tests find it.
    begin = f"import sys; sys.path[:] = {sys.path!r}"
    code = f"{begin}; import {modules}; print([name for name in {FRAMEWORKS!r} if name in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_the_core_imports_no_framework() -> None:
    modules = ", ".join(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for path in CORE
    )
    assert loaded_frameworks(f"{modules}, horovod_sparse.numpy.ops") == "[]"


def test_the_numpy_adapter_imports_no_framework_and_no_mpi() -> None:
    assert loaded_frameworks("horovod_sparse.numpy") == "[]"


def test_the_proof_can_fail() -> None:
    assert loaded_frameworks("torch") == "['torch']"


def test_the_triton_kernels_import_no_horovod() -> None:
    assert loaded_frameworks("horovod_sparse.triton") == "[]"
    assert loaded_frameworks("horovod_sparse.triton.bucket") == "['torch']"


def test_the_torch_adapter_imports_no_other_framework() -> None:
    assert loaded_frameworks("horovod_sparse.torch") == "['torch', 'horovod']"


@pytest.mark.parametrize(
    "module", ["horovod_sparse.tensorflow", pytest.param("horovod_sparse.tensorflow.keras", marks=pytest.mark.full)]
)
def test_the_tensorflow_adapter_imports_no_other_framework(module: str) -> None:
    assert loaded_frameworks(module) == "['tensorflow', 'keras', 'horovod']"


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_dependencies_of_the_core_point_one_way(path: Path) -> None:
    """algebra <- fits stages wire cost ops <- feedback exchanges <- compressors <- buckets residuals pipeline <- adapters."""
    names = imported(path)
    assert not any(name.split(".")[0] in FRAMEWORKS for name in names)
    ours = {name.removeprefix("horovod_sparse.") for name in names if name.startswith("horovod_sparse.")}
    assert not any(name.split(".")[0] in ("numpy", "torch", "tensorflow") for name in ours)
    if path.parent.name == "compressors":
        assert not ours & {"pipeline", "residuals", "buckets", "statistics"}
    if path.stem in ("exchanges", "feedback"):
        assert ours <= {"", "ops", "wire"}
    if path.stem in ("algebra", "fits", "stages", "wire", "ops", "schedules", "averaging", "cost"):
        assert ours <= ({"algebra"} if path.stem == "fits" else set()), f"{path.stem} stands at the bottom"


def test_adapters_never_import_each_other() -> None:
    """But for the array verbs in NumPy, which are TensorFlow's path on the CPU."""
    adapters = ("numpy", "torch", "tensorflow")
    for adapter in adapters:
        for path in PACKAGE.glob(f"{adapter}/**/*.py"):
            allowed = (
                {"horovod_sparse.numpy.ops", "horovod_sparse.numpy.compiled"} if adapter == "tensorflow" else set()
            )
            for other in set(adapters) - {adapter}:
                names = {name for name in imported(path) if name.startswith(f"horovod_sparse.{other}")}
                assert names <= allowed, path


@pytest.mark.full
def test_without_triton_only_its_own_tests_are_skipped() -> None:
    # Where `make setup` puts Triton is then not found.
    code = "import sys, pytest; sys.prefix = '/nowhere'; sys.exit(pytest.main(sys.argv[1:]))"
    tests = ["tests/test_wire.py", "tests/test_triton.py", "tests/test_triton_pipeline.py"]
    command = [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 skipped" in done.stdout and "Triton is not installed" in done.stdout
    assert re.search(r"[1-9]\d* passed", done.stdout)
