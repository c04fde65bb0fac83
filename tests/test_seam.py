"""The seam to stock Horovod: what it checks, that it is idempotent, and what importing it brings."""

from __future__ import annotations

import inspect
import re
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


def test_a_second_call_extends_nothing() -> None:
    before = [dict(vars(cls)) for cls in STOCK_CLASSES]
    seam.install()
    assert [dict(vars(cls)) for cls in STOCK_CLASSES] == before
    extended = vars(horovod_optimizer._DistributedOptimizer)
    stock = [extended[name].__wrapped__ for name in seam._EXTENSIONS if name != "add_param_group"]
    assert {inspect.unwrap(method).__code__.co_filename for method in stock} == {horovod_optimizer.__file__}


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
    with pytest.raises(AssertionError, match=r"TopK\(.*give all ranks equally many batches"):
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
    assert not missing
    offered = set(horovod_sparse.torch.__all__)
    assert {"SIDCo", "TopK", "NoOp", "DistributedOptimizer", "init", "allreduce"} <= offered
    modules = {name for name in offered if inspect.ismodule(getattr(horovod_sparse.torch, name))}
    assert modules <= set(public), "our own modules are not offered"


MEMBERS = """
import horovod
from horovod.torch.optimizer import _DistributedOptimizer
horovod.__version__, before = {version!r}, dict(vars(_DistributedOptimizer))
try:
    import horovod_sparse.torch
except ImportError as error:
    print(error)
print(dict(vars(_DistributedOptimizer)) == before, "add_param_group" in vars(_DistributedOptimizer))
"""


def test_another_horovod_is_refused_before_anything_is_extended() -> None:
    done = python("-c", MEMBERS.format(version="0.29.0"))
    refused, members = done.stdout.splitlines()
    assert re.fullmatch(r"Horovod must be 0\.28\.1, .* got 0\.29\.0; install horovod==0\.28\.1.*", refused), done
    assert members == "True False"


def test_a_build_of_ones_own_is_extended() -> None:
    done = python("-c", MEMBERS.format(version="0.28.1+nv24.1"))
    assert done.stdout == "False True\n", done
