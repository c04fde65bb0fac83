"""The momentum of Keras' SGD, which every worker applies to its own gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from horovod_sparse.tensorflow.compressors import TensorflowCompressor


def moved_momentum(
    compression: TensorflowCompressor, optimizer: Any, gradients: list[Any], variables: list[Any], *, can_move: bool
) -> list[int] | None:
    """Let a compressor with `momentum="auto"` apply an optimizer's momentum, if it may move. Call this in the first step.

    Return the numbers of the velocities that a dense training has left in the optimizer; None if its momentum stays there.
    """
    if compression.momentum != "auto" or not getattr(optimizer, "momentum", 0.0):
        return None
    is_sgd = getattr(type(optimizer), "update_step", None) is keras.optimizers.SGD.update_step
    # Clipping comes after the reduction. It is meant for gradients, not for velocities.
    clips = any(getattr(optimizer, name) is not None for name in ("clipnorm", "clipvalue", "global_clipnorm"))
    sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    moves = can_move and is_sgd and compression.residual and not clips and not sparse
    compression.move_momentum(optimizer.momentum if moves else 0.0, bool(getattr(optimizer, "nesterov", False)))
    if not moves:
        return None
    with tf.init_scope():
        if not optimizer.built:
            optimizer.build(variables)
        return [number for number, velocity in enumerate(optimizer.momentums) if bool(keras.ops.any(velocity != 0))]


@contextmanager
def without_momentum(optimizer: Any, left: Sequence[int]) -> Iterator[None]:
    """Let the optimizer apply gradients without momentum in the block, after the velocities that are `left`.

    The optimizer keeps its velocities as variables, so that its checkpoints stay the same; they are zero otherwise.
    """
    momentum = optimizer.momentum
    for number in left:
        velocity, variable = optimizer.momentums[number], optimizer._trainable_variables[number]
        velocity.assign(velocity * momentum)
        variable.assign_add(velocity * momentum if optimizer.nesterov else velocity)
    optimizer.momentum = 0.0
    try:
        yield
    finally:
        optimizer.momentum = momentum
