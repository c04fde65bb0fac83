"""The momentum of Keras' SGD, which every worker applies to its own gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from horovod_sparse.tensorflow.compressors import TensorflowCompressor


def moved_momentum(
    compression: TensorflowCompressor, optimizer: Any, gradients: list[Any], variables: list[Any], *, can_move: bool
) -> bool:
    """Let a compressor with `momentum="auto"` apply an optimizer's momentum, if it may move. Call this in the first step.

    Return whether it moves.
    """
    if compression.momentum != "auto" or not getattr(optimizer, "momentum", 0.0):
        return False
    is_sgd = getattr(type(optimizer), "update_step", None) is keras.optimizers.SGD.update_step
    # Clipping comes after the reduction. It is meant for gradients, not for velocities.
    clips = any(getattr(optimizer, name) is not None for name in ("clipnorm", "clipvalue", "global_clipnorm"))
    sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    moves = can_move and is_sgd and compression.residual and not clips and not sparse
    compression.move_momentum(optimizer.momentum if moves else 0.0, bool(getattr(optimizer, "nesterov", False)))
    if moves and not optimizer.built:
        with tf.init_scope():
            optimizer.build(variables)
    return moves


@contextmanager
def without_momentum(optimizer: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Let the optimizer apply gradients without momentum in the block, after its own velocities of these variables.

    They are zero unless a dense training has left some, which may also be loaded or broadcast later.
    """
    momentum = optimizer.momentum

    def move(variable: Any, velocity: Any) -> Any:
        velocity.assign(velocity * momentum)
        variable.assign_add(velocity * momentum if optimizer.nesterov else velocity)
        return tf.constant(True)

    for variable in variables:
        velocity = optimizer.momentums[optimizer._get_variable_index(variable)]
        # To look takes a part of the time.
        tf.cond(keras.ops.any(velocity != 0), partial(move, variable, velocity), lambda: tf.constant(False))
    optimizer.momentum = 0.0
    try:
        yield
    finally:
        optimizer.momentum = momentum
