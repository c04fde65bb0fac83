"""What only TensorFlow's seam to stock Horovod does; `tests/torch/test_seam.py` has what all seams do."""

from __future__ import annotations

import importlib
from typing import Any

import horovod._keras
import horovod.tensorflow
import keras
import pytest

from horovod_sparse.tensorflow import TopK, seam
from tests.harness.process import is_from

REPLACED = (horovod.tensorflow, horovod.tensorflow._DistributedGradientTape, horovod._keras)
"""In which the seam replaces functions."""


def test_a_second_call_replaces_nothing() -> None:
    before = [dict(vars(owner)) for owner in REPLACED]
    seam.install()
    assert [dict(vars(owner)) for owner in REPLACED] == before
    ours = [one for members in before for one in members.values() if is_from(seam, one)]
    assert ours and not any(is_from(seam, one.__wrapped__) for one in ours)


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


def test_a_compressor_or_optimizer_of_another_framework_is_refused_with_its_class_and_the_remedy() -> None:
    torch = pytest.importorskip("torch")
    of_torch = importlib.import_module("horovod_sparse.torch").TopK(0.1)
    distributed = importlib.import_module("horovod.tensorflow.keras").DistributedOptimizer
    with pytest.raises(
        TypeError, match=r"got one of horovod_sparse\.torch\..*TopK.*the class from horovod_sparse\.tensorflow"
    ):
        distributed(keras.optimizers.SGD(0.1), compression=of_torch)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(TypeError, match=r"optimizer must be a Keras optimizer, .* got SGD"):
        distributed(sgd, compression=of_torch)
