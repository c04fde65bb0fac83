"""Scenarios: loss scaling in Keras, inside of the distributed optimizer and around it, on every rank the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.tensorflow import DistributedGradientTape, MiCRO, SIDCo, TopK

from ..scenario import TF_2, TF_GLOO_2, scenario
from .common import MakeCompression, assert_identical, everyone, raised
from .keras3 import LOSS, assert_close, assert_in_step, compiled, data, fit, small_model

Wrap = Callable[[Any, Any], Any]
SCALE = 2.0**7


def _scaled(optimizer: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=SCALE, dynamic_growth_steps=3)


def _inside(optimizer: Any, compression: Any) -> Any:
    return hvd.DistributedOptimizer(_scaled(optimizer), compression=compression)


def _around(optimizer: Any, compression: Any) -> Any:
    return _scaled(hvd.DistributedOptimizer(optimizer, compression=compression))


def _plain(optimizer: Any, compression: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, compression=compression)


_CASES: dict[str, tuple[MakeCompression, Wrap, bool, bool]] = {
    "SIDCo-around": (lambda: SIDCo(0.02, warmup=None), _around, False, False),
    "momentum-around": (lambda: TopK(0.02, momentum=0.9, warmup=None), _around, False, True),
    "MiCRO-inside": (lambda: MiCRO(0.02, warmup=None), _inside, False, False),
    "none-around": (lambda: hvd.Compression.none, _around, False, True),
    "clipped-inside": (lambda: TopK(0.02, clip=0.5, warmup=None), _inside, False, True),
    "in_units_of_the_update-around": (lambda: SIDCo(0.02, lr_in_residual=True, warmup=None), _around, False, True),
    "eager": (lambda: TopK(0.02, warmup=None), _around, True, False),
}
"""Compressor, where the scaler is, whether eagerly, and whether the scaler has its variables before the first step."""


@scenario(TF_2, TF_GLOO_2, cases=_CASES)
def keras_overflow_leaves_no_trace(make: MakeCompression, wrap: Wrap, eager: bool, builds: bool) -> None:
    """Training with a scale, and with steps that overflow on one rank, is training without, to rounding."""
    compressions, models = [make(), make()], []
    for one, compression in zip((wrap, _plain), compressions, strict=True):
        # Random choices depend on the names of variables, which are the same in both models then.
        keras.utils.clear_session()
        models.append(compiled(one(keras.optimizers.SGD(0.05), compression), run_eagerly=eager, builds=builds))
    if compressions[0] is not hvd.Compression.none:
        compressions[0].scale_with(models[0].optimizer)
    for step in range(8):
        inputs, labels = data([step])
        overflows = step in (0, 3, 4)
        if overflows and hvd.rank() == 1:
            inputs[0, 0] = np.inf
        for model in models[: 1 if overflows else 2]:
            before = model.weights[0].numpy()
            model.train_on_batch(inputs, labels)
            assert np.array_equal(model.weights[0].numpy(), before) == overflows
    assert int(models[0].optimizer.iterations) == 5
    # It was halved three times and, after three steps in a row, doubled once.
    assert everyone(float(models[0].optimizer.dynamic_scale)) == [SCALE / 4] * hvd.size()
    assert_in_step(models[0])
    assert_close(*models)
    if compressions[0] is not hvd.Compression.none:
        first, second = (compression.state_dict() for compression in compressions)
        for part in ("residuals", "velocities"):
            for mine, theirs in zip(first[part].values(), second[part].values(), strict=True):
                np.testing.assert_allclose(mine, theirs, atol=1e-6, err_msg=part)


@scenario(TF_2)
def a_tape_whose_loss_is_scaled_keeps_residuals_without_the_scale() -> None:
    """Bit by bit training without a scale, as long as nothing overflows."""
    compressions = [SIDCo(0.02, warmup=None) for _ in range(2)]
    models, plain, scaler = (
        [small_model() for _ in range(2)],
        keras.optimizers.SGD(0.05),
        _scaled(keras.optimizers.SGD(0.05)),
    )
    scaler.build(models[0].trainable_variables)
    compressions[0].scale_with(scaler)

    def train(step: int, optimizer: Any, model: Any, compression: Any, scale: Callable[[Any], Any]) -> None:
        inputs, labels = data([step])
        inputs[0, 0] = np.inf if step == 10 and hvd.rank() == 1 else inputs[0, 0]
        with tf.GradientTape() as tape:
            loss = scale(LOSS(labels, model(inputs)))
        tape = DistributedGradientTape(tape, compression=compression)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for step in range(10):
        train(step, scaler, models[0], compressions[0], scaler.scale_loss)
        train(step, plain, models[1], compressions[1], lambda loss: loss)
    assert float(scaler.dynamic_scale) == SCALE * 8
    np.testing.assert_equal(models[1].get_weights(), models[0].get_weights())
    scaled, unscaled = (compression.state_dict()["residuals"] for compression in compressions)
    np.testing.assert_equal([*scaled.values()], [*unscaled.values()])
    before = models[0].weights[0].numpy()
    train(10, scaler, models[0], compressions[0], scaler.scale_loss)
    np.testing.assert_array_equal(models[0].weights[0].numpy(), before)
    assert everyone(float(scaler.dynamic_scale)) == [SCALE * 4] * hvd.size()
    train(11, scaler, models[0], compressions[0], scaler.scale_loss)
    assert (models[0].weights[0].numpy() != before).any()
    assert_identical(models[0].weights)
    message = raised(RuntimeError, lambda: compressions[1].scale_with(scaler))
    assert "scale_with must be called before the first step" in message
    assert "scaler must be a keras.optimizers.LossScaleOptimizer" in raised(
        TypeError, lambda: SIDCo(0.1).scale_with(plain)
    )


@scenario(TF_2)
def overflow_of_a_local_gradient_is_seen_on_every_rank() -> None:
    shared, local = tf.Variable(tf.ones(2000)), tf.Variable(tf.ones(10))
    distributed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=TopK(0.02, warmup=None))
    distributed.register_local_var(local)
    optimizer = _scaled(distributed)
    for infinite in (False, True, False):
        bad = infinite and hvd.rank() == 0
        before = [shared.numpy(), local.numpy()]
        optimizer.apply([tf.random.normal([2000]), tf.fill([10], np.inf if bad else SCALE)], [shared, local])
        assert [np.array_equal(*pair) for pair in zip(before, (shared, local), strict=True)] == [infinite, infinite]
    assert int(distributed.iterations) == 2
    assert everyone(float(optimizer.dynamic_scale)) == [SCALE / 2] * hvd.size()
    assert_identical([shared])


@scenario(
    TF_2,
    cases={
        "one_pass": ("mixed_float16", 1),
        "two_passes": ("mixed_float16", 2),
        "bfloat16": ("mixed_bfloat16", 1),
    },
)
def half_precision_in_keras(policy: str, passes: int) -> None:
    """Keras puts a scaler around ours for float16. Its scale is too large for the first steps."""
    keras.mixed_precision.set_global_policy(policy)
    try:
        compression, sgd = SIDCo(0.02, warmup=None), keras.optimizers.SGD(0.05)
        distributed = hvd.DistributedOptimizer(sgd, compression=compression, backward_passes_per_step=passes)
        model = compiled(distributed)
        is_scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert is_scaled == (policy == "mixed_float16")
        if is_scaled:
            model.optimizer.build(model.trainable_variables)
            model.optimizer.dynamic_scale.assign(2.0**22)
        fit(model, range(20))
        assert_in_step(model)
        if is_scaled:
            assert float(model.optimizer.dynamic_scale) < 2.0**22
            assert 0 < compression.stats().steps < 20 // passes
        else:
            assert compression.stats().steps == 20
    finally:
        keras.mixed_precision.set_global_policy("float32")
