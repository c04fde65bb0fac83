"""Scenarios: the pure-graph path gives what the NumPy path gives."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_sparse.tensorflow import GaussianK, RedSync, SIDCo, Threshold, TopK

from ..scenario import TF_2, TF_4, scenario
from .common import MakeCompression, assert_identical, everyone, normals, raised
from .tape import SETTINGS, assert_lockstep

COMPRESSORS: dict[str, MakeCompression] = {
    "TopK": lambda **settings: TopK(0.01, **settings),
    "SIDCo-exponential": lambda **settings: SIDCo(0.01, stages=3, **settings),
    "SIDCo-gpareto-paper": lambda **settings: SIDCo(0.01, distribution="gpareto", stages=2, adapt="paper", **settings),
    "GaussianK": lambda **settings: GaussianK(0.01, **settings),
    "GaussianK-paper": lambda **settings: GaussianK(0.01, refine="paper", **settings),
    "RedSync": lambda **settings: RedSync(0.01, **settings),
    "RedSync-bisect": lambda **settings: RedSync(0.01, method="bisect", **settings),
    "Threshold": lambda **settings: Threshold(0.05, **settings),
    "TopK-no-residual": lambda **settings: TopK(0.01, residual=False, **settings),
    "TopK-float64": lambda **settings: TopK(0.01, residual_dtype="float64", **settings),
}


@scenario(TF_2, cases={name: (make,) for name, make in COMPRESSORS.items()})
def the_graph_gives_what_numpy_gives(make: MakeCompression) -> None:
    assert_lockstep(make(graph=True, **SETTINGS), 6)


def _model() -> tuple[list[tf.Variable], Any]:
    weights = [
        tf.Variable(normals((20, 30), step=0, rank=0) * 0.2, name="first"),
        tf.Variable(normals((30, 10), step=1, rank=0) * 0.2, name="second"),
    ]

    def loss(inputs: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(tf.nn.relu(inputs @ weights[0]) @ weights[1] - inputs[:, :10]))

    return weights, loss


def _train(compression: Any, weights: list[tf.Variable], loss: Any) -> Any:
    @tf.function
    def train(inputs: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(inputs)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        for weight, gradient in zip(weights, tape.gradient(value, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return value

    return train


@scenario(TF_2, TF_4)
def replicas_of_the_graph_stay_identical() -> None:
    compression = SIDCo(0.02, stages=3, graph=True)
    weights, loss = _model()
    train = _train(compression, weights, loss)
    values = [float(train(tf.constant(normals((16, 20), step=step, rank=hvd.rank(), salt=1)))) for step in range(50)]
    assert_identical(weights)
    assert np.mean(values[-10:]) < np.mean(values[:10])
    norms = everyone(compression.stats().last.total.residual_norm)
    assert len(set(norms)) == hvd.size(), "residuals are every worker's own"


@scenario(TF_2, TF_4)
def a_bad_gradient_raises_on_all_ranks_and_training_goes_on() -> None:
    compression = TopK(0.1, graph=True)
    weights, loss = _model()
    train = _train(compression, weights, loss)
    for step in range(6):
        inputs = normals((16, 20), step=step, rank=hvd.rank())
        before = [weight.numpy() for weight in weights]
        if step == 3:
            if hvd.rank() == 1:
                inputs[0, 0] = np.nan
            message = raised(tf.errors.InvalidArgumentError, lambda given=inputs: train(tf.constant(given)))
            mine = "parameter second" if hvd.rank() == 1 else "of another rank"
            assert f"rank {hvd.rank()}: the gradient of" in message and mine in message, message
            for weight, array in zip(weights, before, strict=True):
                np.testing.assert_array_equal(weight.numpy(), array)
        else:
            train(tf.constant(inputs))
            assert any((weight.numpy() != array).any() for weight, array in zip(weights, before, strict=True))
        assert_identical(weights)


@scenario(TF_2)
def paths_that_differ_raise_on_all_ranks() -> None:
    compression = TopK(0.1, graph=hvd.rank() == 0)
    weights, loss = _model()
    assert "graph" in raised(
        Exception, lambda: _train(compression, weights, loss)(tf.constant(normals((4, 20), step=0, rank=0)))
    )
