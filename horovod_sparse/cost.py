"""When sparse pays: bytes on the wire of dense and sparse exchanges. Plain arithmetic, no framework."""

from __future__ import annotations

from horovod_sparse.wire import message_bytes


def dense_allreduce_bytes(numel: int, itemsize: int, world: int) -> float:
    """Bytes that each of `world` workers sends (and receives) in a ring allreduce of `numel` elements.

    `2 (world - 1)/world * numel * itemsize`: reduce-scatter, then allgather.
    """
    return 2.0 * (world - 1) / world * numel * itemsize


def allgather_bytes(capacity: int, world: int) -> int:
    """Bytes that each of `world` workers sends (and receives) in a ring allgather of one message of `capacity` pairs."""
    return (world - 1) * message_bytes(capacity)


def break_even_ratio(itemsize: int, world: int) -> float:
    """The ratio above which allgathering pairs moves more bytes than a dense ring allreduce of `itemsize` bytes.

    `(world - 1) * ratio * 8 = 2 (world - 1)/world * itemsize`, so `ratio = itemsize / (4 world)`.
    """
    return itemsize / (4.0 * world)
