"""What is done to a gradient before it is added to a residual: clipping and momentum."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.momentum import MomentumCorrection, clip_limit
from horovod_sparse.tensorflow.graph_engine.tensors import finite_norm, norm, plus, wide
from horovod_sparse.tensorflow.step import Step

Tensor = Any


class Clip:
    """Clips this rank's gradients, as `momentum.clip` and `momentum.scaled` do.

    Args:
        compressor: has the settings; without `clip_norm` nothing is clipped.
        world, averages: as for `Pipeline`.
    """

    def __init__(self, compressor: Compressor, world: int, *, averages: bool) -> None:
        wanted = compressor.clip_norm
        self._limit = None if wanted is None else clip_limit(wanted, world, averages=averages)
        self._holds_back = compressor.holds_back

    def factor(self, step: Step) -> Tensor | None:
        """Return the `momentum.clip_factor` of all this rank's gradients with `clip_scope="model"`, otherwise None."""
        if not self._holds_back:
            return None
        gradients = [*step.gradients.values(), *step.dense.values()]
        norms = [finite_norm(tf.cast(gradient, wide(gradient))) for gradient in gradients]
        return self._factor(norm(tf.stack([tf.constant(0.0, tf.float64), *norms])))

    def clipped(self, gradient: Tensor, factor: Tensor | None) -> Tensor:
        """Return the gradient in `wide` type, clipped; without a limit, return it unchanged."""
        if self._limit is None:
            return gradient
        gradient = tf.cast(gradient, wide(gradient))
        if factor is None:
            factor = self._factor(finite_norm(gradient))
        return gradient * tf.cast(factor, gradient.dtype)

    def _factor(self, size: Tensor) -> Tensor:
        one = tf.ones_like(size)
        return tf.where(size > 0.0, tf.minimum(one, self._limit / size), one)


def with_momentum(
    correction: MomentumCorrection, residual: Tensor, velocity: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Return residual and velocity with the gradient added, as `MomentumCorrection.accumulate` does."""
    momentum = tf.cast(correction.momentum, velocity.dtype)
    if correction.nesterov:
        velocity = plus(velocity, gradient) * momentum
        return plus(residual, gradient) + velocity, velocity
    velocity = plus(velocity * momentum, gradient)
    return residual + velocity, velocity
