"""Functions of tensors that the steps of the graph are made of; clipping and momentum."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.momentum import MomentumCorrection, clip_limit
from horovod_sparse.core.layout import Slot
from horovod_sparse.exchange import wire
from horovod_sparse.tensorflow.step import Step

Tensor = Any


def scalar(x: Any) -> Tensor:
    """Return a 0-d float64 tensor."""
    return tf.convert_to_tensor(x, tf.float64)


def _of_scalars(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return staticmethod(lambda *numbers: function(*map(scalar, numbers)))


class Tensors:
    """The `horovod_sparse.estimation.algebra.Algebra` of 0-d float64 tensors."""

    log, expm1, sqrt = map(_of_scalars, (tf.math.log, tf.math.expm1, tf.sqrt))
    maximum, minimum = map(_of_scalars, (tf.maximum, tf.minimum))

    @staticmethod
    def choose(condition: Tensor, yes: Callable[[], Tensor], no: Callable[[], Tensor]) -> Tensor:
        return tf.where(condition, scalar(yes()), scalar(no()))


TENSORS = Tensors()


def all_finite(tensor: Tensor) -> Tensor:
    """Return whether all entries are finite."""
    return tf.reduce_all(tf.math.is_finite(tensor))


def only_finite(tensor: Tensor) -> Tensor:
    """Return the tensor with zeros in place of NaN and infinity."""
    return tf.where(tf.math.is_finite(tensor), tensor, tf.zeros_like(tensor))


def in_range(sums: Tensor) -> Tensor:
    """Limit sums that have overflowed to the largest number of their type."""
    return tf.clip_by_value(sums, sums.dtype.min, sums.dtype.max)


def wide(gradient: Tensor) -> Any:
    """Return the type in which a gradient is clipped."""
    return tf.float64 if gradient.dtype == tf.float64 else tf.float32


def norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm as float64. Float64 entries are scaled, since their squares may leave its range."""
    wide = tf.cast(tensor, tf.float64)
    largest = tf.reduce_max(tf.abs(wide)) if tensor.dtype == tf.float64 else tf.constant(1.0, tf.float64)
    unit = tf.where(largest > 0.0, largest, tf.ones_like(largest))
    return unit * tf.sqrt(tf.reduce_sum(tf.square(wide / unit)))


def finite_norm(gradient: Tensor) -> Tensor:
    """Return the norm of the finite entries."""
    return norm(only_finite(gradient))


def to_float32(values: Tensor) -> Tensor:
    """Return the values as float32, limited to its range."""
    if values.dtype == tf.float32:
        return values
    return tf.cast(tf.clip_by_value(values, -wire.LARGEST, wire.LARGEST), tf.float32)


def piece(flat: Tensor, slot: Slot) -> Tensor:
    """Return a parameter's slice of a flat tensor."""
    return flat[slot.offset : slot.offset + slot.numel]


def without(flat: Tensor, slots: Sequence[Slot], names: Collection[str]) -> Tensor:
    """Return the flat tensor with zeros in the slots that have these names."""
    if not any(slot.name in names for slot in slots):
        return flat
    parts = [piece(flat, slot) for slot in slots]
    return tf.concat([tf.zeros_like(p) if s.name in names else p for s, p in zip(slots, parts, strict=True)], 0)


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
    """Return residual and velocity with the gradient added, as `Ops.accumulate` does with momentum."""
    momentum = tf.cast(correction.momentum, velocity.dtype)
    if correction.nesterov:
        velocity = (velocity + gradient) * momentum
        return residual + gradient + velocity, velocity
    velocity = velocity * momentum + gradient
    return residual + velocity, velocity
