"""The momentum of Keras' SGD, which every worker applies to its own gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.keras.loss_scaling import inner_of

Variable = Any


def move_momentum(
    compression: TensorflowCompressor, optimizer: Any, gradients: Sequence[Any], *, can_move: bool
) -> bool:
    """Let a compressor with `momentum="auto"` apply an optimizer's momentum. Return whether it does.

    Args:
        compression: which then has the momentum. Nothing was reduced yet.
        optimizer: Keras' own, or a LossScaleOptimizer around it.
        gradients: those of the first step.
        can_move: False leaves the momentum in the optimizer.
    """
    inner = inner_of(optimizer)
    if compression.momentum != "auto" or not getattr(inner, "momentum", 0.0):
        return False
    is_sgd = getattr(type(inner), "update_step", None) is keras.optimizers.SGD.update_step
    # Clipping comes after the reduction. It is meant for gradients, not for velocities.
    clips = any(getattr(inner, name) is not None for name in ("clipnorm", "clipvalue", "global_clipnorm"))
    sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    moves = can_move and is_sgd and compression.residual and not clips and not sparse
    compression.move_momentum(inner.momentum if moves else 0.0, bool(getattr(inner, "nesterov", False)))
    return moves


def velocities_left(optimizer: Any, variables: Sequence[Variable]) -> list[int]:
    """Return the numbers of the velocities that a dense training has left in an optimizer. Call this in the first step."""
    inner = inner_of(optimizer)
    with tf.init_scope():
        if not inner.built:
            inner.build(variables)
        return [number for number, velocity in enumerate(inner.momentums) if bool(keras.ops.any(velocity != 0))]


@contextmanager
def without_momentum(optimizer: Any, left: Sequence[int]) -> Iterator[None]:
    """Let the optimizer apply gradients without momentum in the block, after the velocities that are `left`.

    The optimizer keeps its velocities as variables, so that its checkpoints stay the same; they are zero otherwise.
    """
    inner = inner_of(optimizer)
    momentum = inner.momentum
    for number in left:
        velocity, variable = inner.momentums[number], inner._trainable_variables[number]
        velocity.assign(velocity * momentum)
        variable.assign_add(velocity * momentum if inner.nesterov else velocity)
    inner.momentum = 0.0
    try:
        yield
    finally:
        inner.momentum = momentum
