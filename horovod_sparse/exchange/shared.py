"""Values without indices: all entries, or those that all ranks choose alike. Imports no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horovod_sparse.exchange import wire
from horovod_sparse.exchange.protocols import Collective, Entries, Exchange, Exchanging, Round, Run, Sender
from horovod_sparse.exchange.received import check_result, damaged, disagreement
from horovod_sparse.ops.protocol import Array


@dataclass(frozen=True)
class SharedIndices(Exchange):
    """All workers choose the same entries, so that only the values are sent, by one allreduce (`wire`, message 2)."""

    title = "shared indices"

    def rounds(self, numel: int, k: int, capacity: int, world: int) -> Sequence[Round]:
        return [Round("allreduce", capacity + len(wire.tail(True, 0)), "float32")]

    def collectives(self, bucket: Sender, run: Run) -> Exchanging:
        indices = bucket.select().indices
        return (yield from summed(bucket, indices, bucket.take(indices), bucket.capacity, bucket.checksum()))


@dataclass(frozen=True)
class Dense(Exchange):
    """Everything is summed, by one allreduce in the residual's own type (`wire`, message 2 with all entries)."""

    title = "dense"

    def rounds(self, numel: int, k: int, capacity: int, world: int) -> Sequence[Round]:
        return [Round("allreduce", numel + len(wire.tail(True, 0)), None)]

    def collectives(self, bucket: Sender, run: Run) -> Exchanging:
        # Only the step must be the same: workers that have trained with fewer others have states of their own.
        return (yield from summed(bucket, None, bucket.take_all(), bucket.numel, bucket.step))


def summed(bucket: Sender, indices: Array | None, values: Array, length: int, checksum: int) -> Exchanging:
    """Exchange the values at indices that all ranks know (None: all entries), as message 2.

    Args:
        bucket: the bucket, out of whose residual `values` were taken.
        indices: ascending and unique.
        values: one for each index, at most `length`.
        length: number of values in the message, the same on all ranks.
        checksum: a number >= 0. If its lowest 16 bits differ between the ranks, all raise RuntimeError.
    """
    bucket.sent(len(values))
    tail = wire.tail(bucket.finite, checksum)
    total = yield Collective("allreduce", bucket.ops.pack_values(values, length, tail))
    check_result(bucket, total, (length + len(tail),), values.dtype)
    bad, *bits = total[length:].tolist()
    # `bits` holds the sum of each bit of the checksum over the ranks.
    if any(bit not in (0.0, float(bucket.world)) for bit in bits):
        raise disagreement(bucket)
    if not 0 <= bad <= bucket.world or bad % 1:
        raise damaged(
            bucket, "sum of the messages", f"{bad} of {bucket.world} workers say that their gradients are not finite"
        )
    return None if bad else Entries(indices, total[: len(values)])
