"""The seam to stock Horovod for TensorFlow: what it checks, that it is idempotent, what importing it brings."""

from __future__ import annotations

import gc
import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import horovod._keras
import horovod.tensorflow
import keras
import pytest
from process import python

import horovod_sparse.tensorflow
from horovod_sparse.tensorflow import TopK, seam

REPOSITORY = Path(__file__).parent.parent


def _functions() -> list[Any]:
    return [getattr(owner, name) for owner, name, *_ in seam._EXTENSIONS]


def test_a_second_call_replaces_nothing() -> None:
    before = _functions()
    seam.install()
    assert _functions() == before
    assert seam.__file__ not in {inspect.getsourcefile(function.__wrapped__) for function in before}


def test_another_horovod_is_refused_before_anything_is_replaced() -> None:
    code = (
        "import horovod, horovod.tensorflow as stock\n"
        "horovod.__version__, before = '0.29.0', stock._make_allreduce_grads_fn\n"
        "try:\n"
        "    import horovod_sparse.tensorflow\n"
        "except ImportError as error:\n"
        "    print(stock._make_allreduce_grads_fn is before, error)"
    )
    done = python("-c", code)
    assert re.search(r"^True Horovod must be 0\.28\.1, .* got 0\.29\.0; install horovod==0\.28\.1", done.stdout), done


@pytest.mark.parametrize("compression", [TopK(0.1, warmup=None), horovod.tensorflow.Compression.none])
@pytest.mark.parametrize("optimizer", ["sgd", keras.optimizers.SGD, None])
@pytest.mark.parametrize(
    "module", ["horovod.tensorflow.keras", "horovod_sparse.tensorflow.keras", "horovod_sparse.tensorflow"]
)
def test_what_is_no_optimizer_is_refused(module: str, optimizer: Any, compression: Any) -> None:
    with pytest.raises(
        TypeError, match=r"optimizer must be a Keras optimizer, such as keras.optimizers.SGD\(0.1\), got "
    ):
        importlib.import_module(module).DistributedOptimizer(optimizer, compression=compression)


def test_an_optimizer_of_another_keras_is_refused_with_a_compressor() -> None:
    legacy = type("SGD", (), {"from_config": None})()
    with pytest.raises(ValueError, match=r"optimizer must be one of Keras 3 with a sparsifier, got .*SGD"):
        horovod.tensorflow.DistributedOptimizer(legacy, compression=TopK(0.1, warmup=None))


def test_stock_join_is_refused_beside_a_compressor(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    library = horovod.tensorflow.mpi_ops.MPI_LIB
    monkeypatch.setattr(library, "horovod_join", seam._join(lambda: called.append(True)))
    compressor = horovod_sparse.tensorflow.TopK(0.5, warmup=None)
    gc.collect()
    horovod.tensorflow.join()
    store: Any = SimpleNamespace(active=True)
    compressor.bind(store)
    with pytest.raises(AssertionError, match="equally many batches"):
        horovod.tensorflow.join()
    assert called == [True]


def test_all_public_names_of_horovod_are_there() -> None:
    ours = {"DistributedOptimizer", "broadcast_variables"}  # They take Keras 3 too.
    module = horovod_sparse.tensorflow
    # Modules come and go with what else is imported.
    public = {
        name for name, value in vars(horovod.tensorflow).items() if name[0] != "_" and not inspect.ismodule(value)
    }
    public -= ours
    assert not [name for name in public if getattr(module, name, None) is not getattr(horovod.tensorflow, name)]
    assert {"SIDCo", "TopK", "NoOp", "DistributedGradientTape", "init", "allreduce"} | ours <= set(module.__all__)


def _other_names(name: str) -> str:
    return (
        f"import {name.replace('_sparse', '')} as stock, {name} as ours\n"
        "stock.added_later = object()\n"
        "lacking = [name for name in dir(stock) if not hasattr(ours, name)]\n"
        "assert not lacking, lacking\n"
        "assert ours.added_later is stock.added_later and 'added_later' not in ours.__all__\n"
        "assert ours.elastic.run is stock.elastic.run\n"
        "assert not hasattr(ours, 'no_such_name')"
    )


@pytest.mark.parametrize("module", [pytest.param("tensorflow.keras", marks=pytest.mark.full), "tensorflow", "torch"])
@pytest.mark.full
def test_all_other_names_of_horovod_are_there_too(module: str) -> None:
    """Private ones, such as `_executing_eagerly`, and those that come later."""
    pytest.importorskip(f"horovod.{module}", exc_type=ImportError)
    _run(_other_names(f"horovod_sparse.{module}"))


def _run(code: str) -> None:
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
