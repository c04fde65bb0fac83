"""What must be so before any test module is imported, and what every test must leave as it was."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from tests.harness.launch import Launch, launcher_variables

# Triton's kernels are interpreted, on the CPU.
os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if find_spec("triton") is None:
    # Where `make setup` puts it.
    sys.path.append(str(Path(sys.prefix, "triton")))

# Tests that need Triton skip without it; test_docker.py sees to it that `make setup` has installed it.
with suppress(ImportError):
    # Before TensorFlow: in the other order the process crashes.
    if "tensorflow" not in sys.modules:
        import_module("triton")

# A loaded machine may take any time for an example.
settings.register_profile("quick", max_examples=40, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=80, deadline=None, print_blob=True)
settings.load_profile("quick")


QUICK_BACKENDS = ("numpy", "numpy-compiled", "torch")
"""Those that `make test` looks at; every one in this module, which is about what they have in common:"""
EVERY_BACKEND = ("exchange/test_wire",)


ONE = sys.maxsize
EVERY: dict[str, int] = {
    "tensorflow/test_host": ONE,
    "gpu/test_kernels": ONE,
    "gpu/test_bucket": ONE,
    "compressors/test_micro": ONE,
    "parallel/test_processes": ONE,
    "compressors/test_backends": 5,
    "project/test_docs": 4,
    "compressors/test_momentum": 3,
    "numpy/test_virtual": 3,
    "compressors/test_laws": 4,
    "kernels/test_ops": 4,
    "project/test_imports": 3,
}
"""Of the cases of a test of these modules, which take long, `make test` runs every n-th, the first one included."""


OWN = "--compressor"


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run only the tests of a compressor of one's own, or of the `Row` that describes it (tests/harness/table.py)"
    parser.addoption(OWN, metavar="MODULE:NAME", help=text)


def pytest_configure(config: pytest.Config) -> None:
    own = config.getoption(OWN)
    if own is None:
        return
    # Not imported above: it imports the frameworks.
    table = import_module("tests.harness.table")
    try:
        table.COMPRESSORS.append(table.own_row(own))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise pytest.UsageError(f"{OWN} must be module:Class or module:ROW, got {own!r}: {error}") from error


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    if config.getoption(OWN) is not None:
        own = import_module("tests.harness.table").COMPRESSORS[-1]
        items[:] = [item for item in items if hasattr(item, "callspec") and item.callspec.params.get("row") is own]
        return
    seen: Counter[tuple[Path, str]] = Counter()
    for item in items:
        module = f"{item.path.parent.name}/{item.path.stem}"
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        name = str(parameters.get("backend", QUICK_BACKENDS[0]))
        if name not in QUICK_BACKENDS and module not in EVERY_BACKEND:
            item.add_marker(pytest.mark.full)
        every = EVERY.get(module, 1)
        if every > 1 and item.get_closest_marker("full") is None:
            test = item.path, item.originalname
            if seen[test] % every:
                item.add_marker(pytest.mark.full)
            seen[test] += 1


@pytest.fixture(autouse=True)
def _no_launcher_variables_are_left() -> Iterator[None]:
    """A test that initialises MPI or Horovod in this process would confuse every launcher that is started after it."""
    before = launcher_variables()
    yield
    left = launcher_variables() - before
    assert not left, (
        f"the test has left {sorted(left)} in the environment: start a process for what initialises Horovod"
    )


@pytest.fixture(autouse=True)
def _only_parallel_tests_launch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests without the mark `parallel` share the cores: several processes of each would wait for each other for too long."""
    # Not by the fixture `monkeypatch`: a test's own changes must be undone before its other fixtures end.
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("parallel") is None:
            patch.setattr(Launch, "_command", _plain)
        yield


def _plain(launch: Launch, options: Sequence[str]) -> list[str]:
    if launch.launcher != "plain":
        pytest.fail(f"a test that starts {launch} must have the mark 'parallel'")
    return []
