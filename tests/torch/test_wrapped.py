"""What is relied on of stock Horovod's optimizer is in its source, and one module alone relies on it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tests.harness.process import ROOT

stock = pytest.importorskip("horovod.torch.optimizer", exc_type=ImportError)
ADAPTER = ROOT / "horovod_sparse" / "torch"
SOURCE = (ADAPTER / "wrapped.py").read_text()
LINES = re.findall(r"# stock: (.*)", SOURCE)
PRIVATE = set(re.findall(r"optimizer\.(_[a-z]\w*)", SOURCE))


@pytest.mark.parametrize("line", LINES)
def test_the_line_is_there(line: str) -> None:
    assert line in map(str.strip, inspect.getsource(stock).splitlines())


@pytest.mark.parametrize("path", sorted(ADAPTER.glob("*.py")), ids=lambda path: path.stem)
def test_no_other_module_touches_what_is_private(path: Path) -> None:
    assert {"_handles", "_allreduce_delay", "_requires_update", "_synchronized"} <= PRIVATE
    if path.stem != "wrapped":
        found = set(re.findall(r"\b(?:optimizer|self)\.(_[a-z]\w*)", path.read_text()))
        assert not found & PRIVATE
