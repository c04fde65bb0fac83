"""Scenarios: Keras optimizers that divide by the gradient's size exchange updates in place of gradients."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as stock
import keras
import numpy as np
import tensorflow as tf
from driver import ExactLengths

import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.tensorflow import NoOp, TopK

from ..scenario import TF_2, TF_GLOO_2, scenario
from .common import assert_identical, raised
from .keras3 import LOSS, compiled, data, fit, small_model


def _gradients(model: Any, step: int, rank: int) -> list[Any]:
    inputs, labels = data([step], [rank])
    with tf.GradientTape() as tape:
        loss = LOSS(labels, model(inputs))
    return list(tape.gradient(loss, model.trainable_variables))


@scenario(TF_2, TF_GLOO_2, cases={"graph": (False,), "eager": (True,)})
def everything_sent_is_the_mean_of_all_steps(eager: bool) -> None:
    model = compiled(
        hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=NoOp(updates=True, granularity=10_000)),
        run_eagerly=eager,
    )
    alone = [(small_model(), keras.optimizers.Adam(0.01)) for _ in range(stock.size())]
    before = alone[0][0].get_weights()
    lengths = ExactLengths([weights.size for weights in before], stock.size())
    for step in range(5):
        fit(model, [step])
        for rank, (one, adam) in enumerate(alone):
            adam.apply(_gradients(one, step, rank), one.trainable_variables)
        updates = [[old - new for old, new in zip(before, one.get_weights(), strict=True)] for one, _ in alone]
        means = [lengths.factor * np.mean(of_all, axis=0) for of_all in zip(*updates, strict=True)]
        lengths.note([[update.reshape(-1) for update in some] for some in updates])
        before = [old - mean for old, mean in zip(before, means, strict=True)]
        for one, _ in alone:
            one.set_weights(before)
    assert lengths.factor > 1.0
    for mine, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)
    assert_identical(model.weights)


@scenario(TF_2)
def a_movement_that_is_not_finite_raises_everywhere() -> None:
    model = small_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=TopK(0.1))
    optimizer.apply(_gradients(model, 0, stock.rank()), model.trainable_variables)
    before = model.get_weights()
    bad = _gradients(model, 1, stock.rank())
    if stock.rank() == 1:
        bad[0] = bad[0] * np.nan
    raised(Exception, lambda: optimizer.apply(bad, model.trainable_variables))
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), before, strict=True))
    optimizer.apply(_gradients(model, 2, stock.rank()), model.trainable_variables)
    assert_identical(model.weights)
    assert not np.array_equal(model.get_weights()[0], before[0])


@scenario(TF_2)
def each_worker_has_a_loss_scale_of_its_own() -> None:
    model = small_model()
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0)
    optimizer = hvd.DistributedOptimizer(scaler, compression=TopK(0.1))
    for step in range(4):
        gradients = [64.0 * one for one in _gradients(model, step, stock.rank())]
        if step == 2 and stock.rank() == 1:
            gradients[0] = gradients[0] * np.inf
        optimizer.apply(gradients, model.trainable_variables)
    assert_identical(model.weights)
    assert float(scaler.dynamic_scale) == (32.0 if stock.rank() == 1 else 64.0)
    # A schedule of the learning rate, and checkpoints, ask for it.
    assert int(optimizer.iterations) == 4


@scenario(TF_2)
def what_keras_does_to_variables_is_done_to_exchanged_updates() -> None:
    """Constraints hold, what is frozen stays where it is, and a worker may have no gradient at all."""
    model, none = small_model(), [None] * 6
    kernel, frozen = model.layers[0].kernel, model.layers[1]
    kernel.constraint = keras.constraints.MaxNorm(0.5)
    compression, variables = TopK(0.05, warmup=None), list(model.trainable_variables)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=compression)
    for step in range(9):
        if step == 6:
            frozen.trainable, before = False, frozen.kernel.numpy()
        trained = dict(zip(map(id, model.trainable_variables), _gradients(model, step, stock.rank()), strict=True))
        gradients = [trained.get(id(variable)) for variable in variables]
        optimizer.apply(none if (step, stock.rank()) == (3, 1) else gradients, variables)
    assert np.linalg.norm(kernel.numpy(), axis=0).max() < 0.5 + 1e-5
    assert np.array_equal(frozen.kernel.numpy(), before)
    assert_identical(model.weights)
    averaging = keras.optimizers.Adam(0.01, use_ema=True)
    assert "use_ema" in raised(ValueError, lambda: hvd.DistributedOptimizer(averaging, compression=TopK(0.1)))
    other = TopK(0.05, warmup=None, updates=False)
    other.load_state_dict(compression.state_dict())
    gradients = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=other)
    model = small_model()
    assert "updates=" in raised(
        Exception, lambda: gradients.apply(_gradients(model, 0, stock.rank()), model.trainable_variables)
    )
