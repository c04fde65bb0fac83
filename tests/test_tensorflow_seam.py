"""What only TensorFlow's seam to stock Horovod does; `test_seam` has what all seams do."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import horovod.tensorflow
import keras
import pytest

from horovod_sparse.tensorflow import TopK, seam


def _functions() -> list[Any]:
    return [getattr(owner, name) for owner, name, *_ in seam._EXTENSIONS]


def test_a_second_call_replaces_nothing() -> None:
    before = _functions()
    seam.install()
    assert _functions() == before
    assert seam.__file__ not in {inspect.getsourcefile(function.__wrapped__) for function in before}


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
