"""The union of all ranks' entries. Imports no framework. Tested by tests/exchange/test_protocols.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from horovod_sparse.exchange import wire
from horovod_sparse.exchange.protocols import Collective, Entries, Exchange, Exchanging, Round, Sender, Told
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
        gathered = yield Collective("allgather", bucket.index_message())
        indices, numbers = bucket.union(gathered)
        room = min(bucket.capacity * bucket.world, bucket.numel)
        total = yield Collective("allreduce", bucket.value_message(indices, room, None))
        ((count, *headers),) = yield Told([numbers])
        checksums = headers[:: wire.HEADER]
        proposed = np.array(headers[1 :: wire.HEADER], np.int32).view(np.float32).tolist()
        if wire.NOT_FINITE in checksums:
            return None
        for worker, (one, proposal) in enumerate(zip(checksums, proposed, strict=True)):
            if one < 0 or not math.isfinite(proposal):
                raise damaged(bucket, f"message of worker {worker}", f"its header holds {one} and {proposal}")
        if len(set(checksums)) > 1:
            raise disagreement(bucket)
        if count == wire.DAMAGED:
            raise damaged(bucket, "message of a worker", OUT_OF_ORDER)
        bucket.observe(count, proposed)
        return Entries(indices[:count], total[:count])
