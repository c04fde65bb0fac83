"""The union of all ranks' entries. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from horovod_sparse.exchange import wire
from horovod_sparse.exchange.protocols import Collective, Entries, Exchange, Exchanging, Round, Run, Sender
from horovod_sparse.exchange.received import OUT_OF_ORDER, check_result, damaged, disagreement


@dataclass(frozen=True)
class Union(Exchange):
    """Indices are gathered (`wire`, message 3), and all workers' values at their union are summed by allreduce (message 2).

    All residuals become zero there. This gives exact averages. If each worker selects k entries of its own, each sends up to k
    values per worker (gradient build-up).
    """

    title = "union"

    def rounds(self, numel: int, k: int, capacity: int, world: int) -> Sequence[Round]:
        return [
            Round("allgather", wire.HEADER + capacity),
            Round("allreduce", min(world * capacity, numel), "float32"),
        ]

    def collectives(self, bucket: Sender, run: Run) -> Exchanging:
        ops = bucket.ops
        selection = bucket.select()
        header = [bucket.checksum() if bucket.finite else wire.NOT_FINITE, wire.float_bits(bucket.state.proposal)]
        message = ops.pack_indices(selection.indices, header, bucket.capacity)
        gathered = yield Collective("allgather", message)
        check_result(bucket, gathered, (bucket.world * len(message),), message.dtype)
        headers = [_header(row) for row in gathered.reshape(bucket.world, -1)[:, : wire.HEADER].tolist()]
        if any(checksum == wire.NOT_FINITE for checksum, _ in headers):
            bucket.drop_rest()
            return None
        _check_headers(bucket, headers)
        indices = ops.union(gathered, bucket.world, wire.HEADER, bucket.numel)
        if indices is None:
            raise damaged(bucket, "message of a worker", OUT_OF_ORDER)
        bucket.sent(len(indices), selection.found - len(selection.indices))
        bucket.observe(len(indices), [proposed for _, proposed in headers])
        room = min(bucket.capacity * bucket.world, bucket.numel)
        values = bucket.take(indices)
        total = yield Collective("allreduce", ops.pack_values(values, room, []))
        check_result(bucket, total, (room,), values.dtype)
        return Entries(indices, total[: len(indices)])


def _header(numbers: Sequence[float]) -> tuple[int, float]:
    """Return the checksum and the proposed number in the header of a message of indices."""
    checksum, bits = numbers
    return int(checksum), wire.float_of(int(bits))


def _check_headers(bucket: Sender, headers: Sequence[tuple[int, float]]) -> None:
    """Raise unless all ranks have sent the same checksum, and each has proposed a finite number."""
    for sender, (checksum, proposed) in enumerate(headers):
        if checksum < 0 or not math.isfinite(proposed):
            raise damaged(bucket, f"message of worker {sender}", f"its header holds {checksum} and {proposed}")
    if len({checksum for checksum, _ in headers}) > 1:
        raise disagreement(bucket)
