"""The one list of compressors: every adapter has them all, for Python and for type checkers."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from horovod_sparse import compressors
from horovod_sparse.compressors import COMPRESSORS
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.binding import BoundCompressor
from tests.harness.makers import MakeCompression, makers
from tests.harness.process import ROOT, python

NEEDS = {
    "numpy": (),
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "horovod"),
    "tensorflow.keras": ("tensorflow", "horovod"),
}
ADAPTERS = [adapter for adapter, needs in NEEDS.items() if all(map(find_spec, needs))]
"""Those that can be imported here."""
MIXINS = {"torch": "TorchCompressor", "tensorflow": "TensorflowCompressor"}

MAKERS = makers(0.1, Threshold={"threshold": 1.0})

for_all_classes = pytest.mark.parametrize("cls", COMPRESSORS, ids=lambda cls: cls.__name__)


@pytest.mark.parametrize(("framework", "mixin"), MIXINS.items())
def test_the_adapters_have_a_line_for_every_compressor(framework: str, mixin: str) -> None:
    source = f"horovod_sparse/{framework}/compressors.py"
    text = (ROOT / source).read_text()
    for cls in COMPRESSORS:
        line = f"class {cls.__name__}({mixin}, compressors.{cls.__name__}): ...\n"
        assert line in text, f"add a line to {source}: {line}"


def test_the_table_of_the_laws_has_a_row_for_every_compressor() -> None:
    # Not imported above: adapters that lack a line cannot be imported.
    rows = {row.cls for row in import_module("tests.harness.table").COMPRESSORS}
    for cls in COMPRESSORS:
        assert cls in rows, f"add a row to tests/table.py: {cls.__name__}"


def test_the_laws_take_a_class_of_ones_own_or_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    table = import_module("tests.harness.table")
    assert table.own_row("horovod_sparse.compressors:TopK") == table.Row("TopK", compressors.TopK)
    monkeypatch.setattr(table, "ROW", table.Row("own", compressors.TopK, largest=False), raising=False)
    assert table.own_row("tests.harness.table:ROW") is table.ROW
    with pytest.raises(TypeError, match=r"Backend must be a subclass of horovod_sparse\.compressors\.base\.Compressor"):
        table.own_row("tests.harness.table:Backend")


@pytest.mark.parametrize("adapter", ADAPTERS)
@for_all_classes
def test_every_adapter_has_every_compressor(adapter: str, cls: type[Compressor]) -> None:
    module = import_module(f"horovod_sparse.{adapter}")
    made = getattr(module, cls.__name__)
    assert issubclass(made, cls) and cls.__name__ in module.__all__
    framework = adapter.partition(".")[0]
    if framework in MIXINS:
        assert issubclass(made, BoundCompressor)
        if find_spec("horovod"):
            assert issubclass(made, import_module(f"horovod.{framework}.compression").Compressor)
        assert made.__module__ == f"horovod_sparse.{framework}.compressors"
        assert sys.modules[made.__module__].__all__ == compressors.__all__, "nothing else is exported"
    else:
        assert made is cls
    assert made.__doc__ == cls.__doc__ and cls.__doc__


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_compressors_can_be_copied(adapter: str, make: MakeCompression) -> None:
    compression = make(import_module(f"horovod_sparse.{adapter}"), slack=3.0)
    for other in (copy.deepcopy(compression), pickle.loads(pickle.dumps(compression))):
        assert type(other) is type(compression) and repr(other) == repr(compression)


@pytest.mark.full
def test_mypy_checks_what_users_write() -> None:
    pytest.importorskip("mypy")
    code = (
        "from horovod_sparse.torch import SIDCo, MomentumCorrection, Schedule\n"
        "reveal_type(SIDCo(ratio=0.1).stats())\n"
        "SIDCo(0.1, warmup=2.0, momentum=MomentumCorrection(0.9))\n"
        "SIDCo(ratoi=0.1)\n"
        "SIDCo(0.1, adapt='strong')\n"
    )
    done = python("-m", "mypy", "--config-file", "pyproject.toml", "-c", code, limit=300, PYTHONPATH=str(ROOT))
    assert 'Revealed type is "horovod_sparse.core.statistics.Stats"' in done.stdout, done.stdout + done.stderr
    found = re.findall(r"<string>:(\d+): error: .*\[([a-z-]+)\]", done.stdout)
    assert found == [("4", "call-arg"), ("5", "arg-type")], done.stdout
    assert 'Unexpected keyword argument "ratoi"' in done.stdout
