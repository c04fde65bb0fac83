"""Which modules are imported by which, proved in subprocesses and by reading the sources."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import horovod_sparse
from tests.harness.process import python

PACKAGE = Path(horovod_sparse.__file__).parent
TESTS = Path(__file__).parent
FRAMEWORKS = ("torch", "torch._dynamo", "tensorflow", "keras", "horovod", "mpi4py")
"""And PyTorch's compiler, which takes seconds to import."""
LAYERS = (
    "ops", "estimation", "exchange", "compressors", "core", "kernels", "numpy", "torch", "tensorflow", "contrib", "tools",
)  # fmt: skip
"""The packages, from the bottom to the top."""
ADAPTERS = {"numpy", "torch", "tensorflow"}
NAMES = {PACKAGE / name / "__init__.py" for name in (*ADAPTERS, "tensorflow/keras")}
"""These only collect what users import, also from `contrib`."""
CORE = sorted(path for package in LAYERS[:5] for path in PACKAGE.glob(f"{package}/*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


LOADED: dict[str, tuple[str, ...]] = {
    ", ".join(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for path in CORE
    ): (),
    "horovod_sparse.numpy": (),
    "horovod_sparse.kernels.gpu": (),
    "horovod_sparse.kernels.gpu.bucket": ("torch",),
    "horovod_sparse.torch": ("torch", "horovod"),
    "horovod_sparse.tensorflow": ("tensorflow", "keras", "horovod"),
    "horovod_sparse.tensorflow.keras": ("tensorflow", "keras", "horovod"),
}
"""Of `FRAMEWORKS`, what modules bring."""


@pytest.mark.parametrize(
    ("modules", "frameworks"),
    [
        pytest.param(*case, id=case[0].split(", ")[-1], marks=[pytest.mark.full] if "keras" in case[0] else [])
        for case in LOADED.items()
    ],
)
def test_no_other_framework_is_imported(modules: str, frameworks: tuple[str, ...]) -> None:
    # Triton is found where the tests find it.
    begin = f"import sys; sys.path[:] = {sys.path!r}"
    code = f"{begin}; import {modules}; print([name for name in {FRAMEWORKS!r} if name in sys.modules])"
    done = python("-c", code)
    assert done.returncode == 0, done
    assert done.stdout.strip() == str([*frameworks])


@pytest.mark.parametrize("name", ["SIDCo", "MomentumCorrection"])
def test_a_public_name_is_said_to_be_in_the_adapters(name: str) -> None:
    with pytest.raises(
        ImportError, match=f"^{name} must be imported for a framework: from horovod_sparse.torch import {name}"
    ):
        exec(f"from horovod_sparse import {name}")
    assert not hasattr(horovod_sparse, "Absent") and not hasattr(horovod_sparse, "absent")


def package_of(module: str) -> str:
    """Return the layer of one of our modules; "" for the package itself and for other libraries."""
    ours, _, rest = module.partition(".")
    package = rest.split(".")[0]
    return package if ours == "horovod_sparse" and package in LAYERS else ""


@pytest.mark.parametrize("package", LAYERS)
def test_no_import_points_upwards_or_to_another_adapter(package: str) -> None:
    """But for the array operations in NumPy, which are TensorFlow's path on the CPU."""
    allowed = {"", *LAYERS[: LAYERS.index(package) + 1]}
    if package in ADAPTERS:
        allowed -= ADAPTERS - {package}
    shared = ("horovod_sparse.numpy.ops", "horovod_sparse.numpy.compiled") if package == "tensorflow" else ()
    for path in PACKAGE.glob(f"{package}/**/*.py"):
        here = allowed | ({"contrib"} if path in NAMES else set())
        refused = {one for one in imported(path) if package_of(one) not in here and not one.startswith(shared)}
        assert not refused, f"{path} imports {refused}"


def test_there_is_no_circle_of_modules() -> None:
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    arrows = {name: imported(path) & modules.keys() for name, path in modules.items()}
    while arrows:
        free = {name for name, targets in arrows.items() if not targets & arrows.keys()}
        assert free, f"these modules import each other in a circle: {sorted(arrows)}"
        arrows = {name: targets for name, targets in arrows.items() if name not in free}
