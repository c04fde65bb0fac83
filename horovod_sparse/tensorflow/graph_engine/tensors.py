"""Functions of tensors that the steps of the graph are made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.core.layout import Slot
from horovod_sparse.exchange import wire

Tensor = Any


class Tensors:
    """The `horovod_sparse.estimation.algebra.Algebra` of 0-d float64 tensors."""

    def log(self, x: Tensor) -> Tensor:
        return tf.math.log(scalar(x))

    def expm1(self, x: Tensor) -> Tensor:
        return tf.math.expm1(scalar(x))

    def sqrt(self, x: Tensor) -> Tensor:
        return tf.sqrt(scalar(x))

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        return tf.maximum(scalar(a), scalar(b))

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        return tf.minimum(scalar(a), scalar(b))

    def choose(self, condition: Tensor, yes: Callable[[], Tensor], no: Callable[[], Tensor]) -> Tensor:
        return tf.where(condition, scalar(yes()), scalar(no()))


TENSORS = Tensors()


def scalar(x: Any) -> Tensor:
    """Return a 0-d float64 tensor."""
    return tf.convert_to_tensor(x, tf.float64)


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


def plus(sum_: Tensor, gradient: Tensor) -> Tensor:
    """Return the sum in the first one's type. Add in the wider type, because a dense gradient keeps its own type."""
    wide = tf.float64 if tf.float64 in (sum_.dtype, gradient.dtype) else tf.float32
    return tf.cast(tf.cast(sum_, wide) + tf.cast(gradient, wide), sum_.dtype)


def to_float32(values: Tensor) -> Tensor:
    """Return the values as float32, limited to its range."""
    if values.dtype == tf.float32:
        return values
    return tf.cast(tf.clip_by_value(values, -wire.LARGEST, wire.LARGEST), tf.float32)


def piece(flat: Tensor, slot: Slot) -> Tensor:
    """Return a parameter's slice of a flat tensor."""
    return flat[slot.offset : slot.offset + slot.numel]


def part(flat: Tensor, slot: Slot) -> Tensor:
    """Return a parameter's slice in its shape."""
    return tf.reshape(piece(flat, slot), slot.shape)


def without(flat: Tensor, slots: Sequence[Slot], names: Collection[str]) -> Tensor:
    """Return the flat tensor with zeros in the slots that have these names."""
    if not any(slot.name in names for slot in slots):
        return flat
    parts = [piece(flat, slot) for slot in slots]
    return tf.concat([tf.zeros_like(p) if s.name in names else p for s, p in zip(slots, parts, strict=True)], 0)
