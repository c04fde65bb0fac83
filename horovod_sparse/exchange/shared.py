"""Values without indices: all entries, or those that all ranks choose alike. Imports no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horovod_sparse.exchange import wire
from horovod_sparse.exchange.protocols import Exchange, Exchanging, Round, Sender
from horovod_sparse.exchange.received import summed


@dataclass(frozen=True)
class SharedIndices(Exchange):
    """All workers choose the same entries, so that only the values are sent, by one allreduce (`wire`, message 2)."""

    title = "shared indices"
    needs = "alike"

    def rounds(self, numel: int, k: int, capacity: int, world: int) -> Sequence[Round]:
        return [Round("allreduce", capacity + len(wire.tail(0)), "float32")]

    def collectives(self, bucket: Sender) -> Exchanging:
        indices = bucket.select().indices
        return (yield from summed(bucket, indices, bucket.capacity, bucket.checksum()))


@dataclass(frozen=True)
class Dense(Exchange):
    """Everything is summed, by one allreduce in the residual's own type (`wire`, message 2 with all entries)."""

    title = "dense"
    needs = "all"

    def rounds(self, numel: int, k: int, capacity: int, world: int) -> Sequence[Round]:
        return [Round("allreduce", numel + len(wire.tail(0)), None)]

    def collectives(self, bucket: Sender) -> Exchanging:
        # Only the step must be the same: workers that have trained with fewer others have states of their own.
        return (yield from summed(bucket, None, bucket.numel, bucket.step))
