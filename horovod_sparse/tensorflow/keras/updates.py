"""Updates that are exchanged in place of gradients: every worker's optimizer steps alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.tensorflow.keras.loss_scaling import is_scaler, spoiled
from horovod_sparse.tensorflow.names import plain

Variable = Any


def step_alone(
    apply: Callable[[list[Any], list[Variable]], None],
    gradients: list[Any],
    variables: list[Variable],
    exchanged: Sequence[Variable],
    reduce: Callable[[list[Any], list[Variable], Any], list[Any]],
    optimizer: Any,
) -> None:
    """Apply this worker's gradients, and then exchange how far that has moved the variables.

    Args:
        apply: the optimizer's own step.
        gradients: of this worker. If one holds NaN or infinity, the exchange raises on all workers, and the optimizer has seen
            zeros; a LossScaleOptimizer leaves out the step of this worker instead.
        variables: whose gradients they are.
        exchanged: those of them that are the same on all workers.
        reduce: takes movements, their variables and the optimizer. Returns the means over the workers. If it raises, these
            variables are as before the step.
        optimizer: Keras' own, or a LossScaleOptimizer around it.
    """
    before = [tf.identity(plain(variable)) for variable in exchanged]
    given = gradients if is_scaler(optimizer) else [_finite(gradient) for gradient in gradients]
    apply(given, variables)
    moved = [start - plain(variable) for start, variable in zip(before, exchanged, strict=True)]
    if not is_scaler(optimizer):
        moved = spoiled(moved, gradients)
    for start, variable in zip(before, exchanged, strict=True):
        plain(variable).assign(start)
    for mean, variable in zip(reduce(moved, list(exchanged), optimizer), exchanged, strict=True):
        plain(variable).assign_sub(mean)


def _finite(gradient: Any) -> Any:
    """Return a gradient in which NaN and infinity are zero."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_finite(gradient.values), gradient.indices, gradient.dense_shape)
    return tf.where(tf.math.is_finite(gradient), gradient, tf.zeros_like(gradient))
