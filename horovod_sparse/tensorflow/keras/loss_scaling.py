"""Distributed optimizers with a `keras.optimizers.LossScaleOptimizer`, which may be inside of them or around them.

It looks whether gradients are finite, and leaves out the step if they are not. It must look at reduced gradients, so that all
ranks do the same. Residuals are kept without the scale (`core.step.Step`).

Tested by tests/parallel/tf/scaling.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

Variable = Any


def is_scaler(optimizer: Any) -> bool:
    """Return whether an optimizer scales the loss and leaves out steps."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


@functools.cache
def follow_scalers() -> None:
    """Let `LossScaleOptimizer.apply` reduce the gradients first if the optimizer inside is distributed.

    Otherwise ranks whose gradients are finite would call that optimizer, and wait for the ranks that do not. A second call
    does nothing.
    """
    stock = keras.optimizers.LossScaleOptimizer.apply

    @tf.autograph.experimental.do_not_convert
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Variable] | None = None) -> None:
        distributed = vars(self.inner_optimizer).get("apply")
        if hasattr(distributed, "local_variables"):
            distributed.step(grads, trainable_variables, self, functools.partial(stock, self))
        else:
            stock(self, grads, trainable_variables)

    keras.optimizers.LossScaleOptimizer.apply = apply


def spoiled(gradients: Sequence[Any], local: Sequence[Any]) -> list[Any]:
    """Return gradients of which one is NaN if a local gradient is not finite, so that all ranks leave out the step."""
    values = [one.values if isinstance(one, tf.IndexedSlices) else one for one in local if one is not None]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(one)) for one in values])
    changed = list(gradients)
    first = next((number for number, one in enumerate(changed) if isinstance(one, tf.Tensor)), None)
    if first is not None:
        changed[first] = tf.where(finite, changed[first], tf.constant(math.nan, changed[first].dtype))
    return changed
