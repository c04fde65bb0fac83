"""The union of all ranks' entries. Imports no framework. Tested by tests/exchange/test_protocols.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from horovod_sparse.exchange import wire
from horovod_sparse.exchange.protocols import Collective, Entries, Exchange, Exchanging, Round, Sender
from horovod_sparse.exchange.received import OUT_OF_ORDER, damaged, disagreement


@dataclass(frozen=True)
class Union(Exchange):
    """Indices are gathered (`wire`, message 3), and all workers' values at their union are summed by allreduce (message 2)."""

    title = "union"
    needs = "largest"

    def rounds(self, numel: int, k: int, capacity: int, world: int) -> Sequence[Round]:
        return [
            Round("allgather", wire.HEADER + capacity),
            Round("allreduce", min(world * capacity, numel), "float32"),
        ]

    def collectives(self, bucket: Sender) -> Exchanging:
        ops = bucket.ops
        selection = bucket.select()
        header = [bucket.checksum() if bucket.finite else wire.NOT_FINITE, wire.float_bits(bucket.state.proposal)]
        message = ops.pack_indices(selection.indices, header, bucket.capacity)
        gathered = yield Collective("allgather", message)
        headers = gathered.reshape(bucket.world, -1)[:, : wire.HEADER].tolist()
        checksums, bits = (list(numbers) for numbers in zip(*headers, strict=True))
        if wire.NOT_FINITE in checksums:
            return None
        proposed: list[float] = np.array(bits, np.int32).view(np.float32).tolist()
        for worker, (checksum, number) in enumerate(zip(checksums, proposed, strict=True)):
            if checksum < 0 or not math.isfinite(number):
                raise damaged(bucket, f"message of worker {worker}", f"its header holds {checksum} and {number}")
        if len(set(checksums)) > 1:
            raise disagreement(bucket)
        indices = ops.union(gathered, bucket.world, wire.HEADER, bucket.numel)
        if indices is None:
            raise damaged(bucket, "message of a worker", OUT_OF_ORDER)
        bucket.sent(len(indices))
        bucket.observe(len(indices), proposed)
        room = min(bucket.capacity * bucket.world, bucket.numel)
        values = bucket.take_out(indices)
        total = yield Collective("allreduce", ops.pack_values(values, room, []))
        return Entries(indices, total[: len(indices)])
