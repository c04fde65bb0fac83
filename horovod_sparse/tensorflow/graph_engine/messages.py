"""The messages of a bucket: packed, checked and added up by TensorFlow operations."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from horovod_sparse.exchange import wire
from horovod_sparse.tensorflow.graph_engine.bucket import GraphBucket

Tensor = Any


def pack(indices: Tensor, values: Tensor, capacity: int) -> Tensor:
    """Return the message of pairs that `wire` defines: int32, shape (capacity, 2)."""
    room = [[0, capacity - tf.size(indices)]]
    rows = tf.cast(tf.pad(indices, room, constant_values=wire.PADDING), tf.int32)
    # Stack as floats, for the reason given in `receive`.
    return tf.bitcast(tf.stack([tf.bitcast(rows, tf.float32), tf.pad(values, room)], axis=1), tf.int32)


def receive(bucket: GraphBucket, gathered: Tensor, divisor: Tensor, *, world: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the reduced gradient, flat, and whether all gradients were finite. If not, the reduced one is NaN."""
    numel, dtype = bucket.layout.numel, bucket.layout.residual_dtype
    # Handle the rows as floats, because many operations on int32 run on the host, even between tensors on a GPU.
    rows = tf.bitcast(gathered, tf.float32)
    numbers = tf.bitcast(rows[:, 0], tf.int32)
    # Do not reshape to (world, capacity, 2): TensorFlow's optimizer would move the reshape before the length check.
    # One check follows the other, so that every rank raises the same error.
    for check in (_check_length, _check_indices):
        with tf.control_dependencies([check(bucket, numbers, world, rank)]):
            numbers = tf.identity(numbers)
    finite = tf.reduce_all(numbers != wire.NOT_FINITE)
    # Padding is added to an extra last entry, so that no shape depends on data. So is what follows in a message that says that
    # a gradient is not finite: its indices have not been checked.
    inside = (numbers >= 0) & (numbers < numel)
    indices = tf.cast(tf.where(inside, numbers, numel), tf.int64)[:, None]
    values = tf.cast(rows[:, 1] / divisor, dtype)
    flat = tf.zeros([numel + 1], dtype)
    for start in range(0, world * bucket.capacity, bucket.capacity):
        part = slice(start, start + bucket.capacity)
        flat = tf.tensor_scatter_nd_add(flat, indices[part], values[part])
    return tf.where(finite, flat[:numel], tf.constant(math.nan, dtype)), finite


def _check_length(bucket: GraphBucket, numbers: Tensor, world: int, rank: int) -> Any:
    expected, rows = world * bucket.capacity, tf.shape(numbers)[0]
    message = (
        f"rank {rank}: the messages for bucket {bucket.name} must have {expected} rows together; the ranks "
        "run different models, settings or versions of horovod_sparse; got"
    )
    return tf.debugging.Assert(tf.equal(rows, expected), [message, rows])


def _check_indices(bucket: GraphBucket, numbers: Tensor, world: int, rank: int) -> Any:
    """Assert that each worker's indices pass `wire.flaw`, or that its first row says its gradient is not finite."""
    numel, capacity = bucket.layout.numel, bucket.capacity
    parts = [numbers[sender * capacity : (sender + 1) * capacity] for sender in range(world)]
    right = tf.stack([_in_order(part, numel) for part in parts])
    sender = tf.reduce_min(tf.where(right, world, tf.range(world)))
    message = [
        f"rank {rank}: the message of worker ",
        tf.as_string(sender),
        f" for bucket {bucket.name} is damaged: expected indices that ascend within [0, {numel}), then padding (-1). The ranks "
        "run different models or different versions of horovod_sparse; got",
    ]
    damaged = numbers[sender * capacity : (sender + 1) * capacity]
    return tf.debugging.Assert(tf.reduce_all(right), [tf.strings.join(message), damaged])


def _in_order(part: Tensor, numel: int) -> Tensor:
    """Return whether one worker's indices are as they should be."""
    before, after = part[:-1], part[1:]
    follows = tf.reduce_all((after == wire.PADDING) | ((before >= 0) & (after > before)))
    in_range = tf.reduce_all(part < numel) & tf.reduce_all(part[:1] >= wire.PADDING)
    return tf.reduce_any(part[:1] == wire.NOT_FINITE) | (follows & in_range)
