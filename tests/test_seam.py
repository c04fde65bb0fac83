"""The seam to stock Horovod: what it checks, that it is idempotent and reversible, and what importing it brings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import horovod
import horovod.torch
import pytest
from horovod.torch import join as stock_join
from horovod.torch import optimizer as horovod_optimizer
from horovod.torch.mpi_ops import mpi_lib
from process import python

import horovod_sparse.torch
from horovod_sparse.core import binding
from horovod_sparse.torch import seam

STOCK_CLASSES = (horovod_optimizer._DistributedOptimizer, horovod_optimizer._DistributedAdasumOptimizer)
REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
def stock() -> Iterator[Any]:
    """Stock Horovod's optimizer class as it was installed; extended again afterwards."""
    seam.uninstall()
    try:
        yield horovod_optimizer._DistributedOptimizer
    finally:
        seam.install()


def _members() -> list[dict[str, Any]]:
    return [dict(vars(cls)) for cls in STOCK_CLASSES]


def test_another_horovod_is_refused_before_anything_is_extended(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _members()
    monkeypatch.setattr(horovod, "__version__", "0.29.0")
    with pytest.raises(ImportError, match=r"Horovod must be 0\.28\.1, .* got 0\.29\.0; install horovod==0\.28\.1"):
        seam.install()
    assert _members() == before
    # A build of one's own.
    monkeypatch.setattr(horovod, "__version__", "0.28.1+nv24.1")
    seam.install()
    assert "add_param_group" in vars(stock)


# --- install and uninstall ---


def test_uninstall_restores_stock_exactly() -> None:
    extended = _members()
    seam.uninstall()
    try:
        stock = _members()
        for members in stock:
            sources = {value.__code__.co_filename for value in members.values() if inspect.isfunction(value)}
            assert seam.__file__ not in sources
            assert horovod_optimizer.__file__ in sources
        assert "add_param_group" not in stock[0]
        seam.uninstall()
        assert _members() == stock
        seam.install()
        seam.uninstall()
        assert _members() == stock
    finally:
        seam.install()
    again = _members()
    assert [members.keys() for members in again] == [members.keys() for members in extended]
    assert all(extended[0][name].__wrapped__ is stock[0][name] for name in seam._EXTENSIONS if name in stock[0])
    assert again[0]["step"].__wrapped__ is stock[0]["step"], "a new extension wraps the stock method, not an extension"


def test_stock_join_is_untouched_unless_a_compressor_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a name that was imported before; an optimizer that nobody uses any more does not count."""

    def stock(*args: Any) -> None:
        raise LookupError

    compressor = horovod_sparse.torch.TopK(0.5, warmup=None)
    monkeypatch.setattr(mpi_lib, "horovod_torch_join", seam._join(stock))
    # Compressors of other tests may still serve.
    monkeypatch.setattr(binding, "_serving", WeakSet())
    with pytest.raises(LookupError):
        stock_join()
    store: Any = SimpleNamespace(active=True)
    compressor.bind(store)
    with pytest.raises(AssertionError, match=r"TopK\(.*horovod_sparse\.torch\.joined\(loader\)"):
        stock_join()
    cycle: list[Any] = [compressor]
    cycle.append(cycle)
    del compressor, cycle
    with pytest.raises(LookupError):
        stock_join()


# --- what importing brings ---


def test_all_public_names_of_horovod_are_there() -> None:
    public = [name for name in vars(horovod.torch) if not name.startswith("_")]
    missing = [name for name in public if getattr(horovod_sparse.torch, name, None) is not getattr(horovod.torch, name)]
    assert set(missing) == {"broadcast_parameters", "broadcast_optimizer_state"}, "ours replace these alone"
    offered = set(horovod_sparse.torch.__all__)
    assert {"SIDCo", "TopK", "NoOp", "DistributedOptimizer", "init", "allreduce"} <= offered
    modules = {name for name in offered if inspect.ismodule(getattr(horovod_sparse.torch, name))}
    assert modules <= set(public), "our own modules are not offered"


def test_import_fails_with_a_clear_message_on_another_horovod() -> None:
    code = "import horovod; horovod.__version__ = '0.27.0'\nimport horovod_sparse.torch"
    done = python("-c", code)
    assert done.returncode == 1
    assert "ImportError: Horovod must be 0.28.1" in done.stderr
