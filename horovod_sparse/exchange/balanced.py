"""The balanced exchange: each rank sums up what all ranks have sent to its region of the bucket. Imports no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horovod_sparse.exchange import regions, wire
from horovod_sparse.exchange.protocols import Collective, Exchange, Exchanging, Messages, Round, Run, Sender
from horovod_sparse.exchange.received import check_result, damaged, disagreement, rows_of
from horovod_sparse.ops.protocol import Array


@dataclass(frozen=True)
class Balanced(Exchange):
    """About k entries are reduced for any number of workers: an alltoall to owners, then an allgather. EXPERIMENTAL.

    Each worker owns a region of the bucket. It adds what it receives to its own residual there, forwards about k/n of the
    largest sums, and keeps the others (`wire`, messages 5 and 6; after Ok-Topk, https://arxiv.org/abs/2201.07598). So each
    worker sends up to 5 k numbers for any number n of workers, if n is much less than k and slack is 1.5 or less.
    """

    title = "balanced"
    needs = "spread"
    owns_parts = True

    def rounds(self, numel: int, k: int, capacity: int, world: int) -> Sequence[Round]:
        return [
            Round("alltoall", 2 * world * regions.room(k, capacity, world)),
            Round("allgather", 2 * (regions.forwarded(k, world) + 1)),
        ]

    def collectives(self, bucket: Sender, run: Run) -> Exchanging:
        ops, world = bucket.ops, bucket.world
        # Another number of workers or another bucket may have saved them.
        bounds = regions.fitting(bucket.state.bounds, bucket.numel, world)
        run.place = slice(bounds[bucket.position], bounds[bucket.position + 1])
        run.before = ops.copy(bucket.buffer[run.place])
        # The owner knows all of its region. What it sends is for the others.
        bucket.buffer[run.place] = 0
        k = bucket.k - bucket.k // world
        selection = bucket.select_from(bucket.buffer, k, bucket.capacity_for(bucket.numel, k))
        room = regions.room(bucket.k, bucket.capacity, world)
        indices, counts = ops.fit(bucket.buffer, selection.indices, bounds, room)
        message = ops.pack_regions(indices, bucket.take(indices), bounds, counts, room)
        received = yield Collective("alltoall", message)
        # Whatever is wrong, the other ranks are told: an error here would leave them waiting.
        region = ops.copy(run.before)
        count = _add_parts(bucket, received, message, region)
        is_finite = bucket.finite and ops.all_finite(region)
        room = regions.forwarded(bucket.k, world)
        most = min(room, len(region)) if is_finite else 0
        forwarded = ops.select_largest(region, most).indices if most else indices[:0]
        message = ops.pack(forwarded + run.place.start, ops.take(region, forwarded), room + 1)
        run.after, run.masked = region, [indices, forwarded + run.place.start]
        bucket.sent(len(indices) + most, selection.found - len(indices))
        message[-1, 0] = regions.checksum(bounds) if is_finite else wire.NOT_FINITE
        message[-1, 1] = count
        gathered = yield Collective("allgather", message)
        check_result(bucket, gathered, (world * len(message), 2), message.dtype)
        messages = gathered.reshape(world, -1, 2)
        checksums, numbers = zip(*messages[:, -1].tolist(), strict=True)
        if wire.NOT_FINITE in checksums:
            bucket.drop_rest()
            return None
        if len(set(checksums)) > 1:
            raise disagreement(bucket)
        if min(numbers) < 0:
            bad = f"message to worker {numbers.index(min(numbers))}"
            raise damaged(bucket, bad, "its indices do not ascend within the worker's region")
        pairs = messages[:, :-1].reshape(-1, 2)
        rows = rows_of(bucket, pairs, world)
        if rows is None:
            return None
        bucket.state.bounds = regions.balanced(bounds, numbers, regions.gain(bucket.sparse_step))
        return Messages(pairs, rows)


def _add_parts(bucket: Sender, received: Array, message: Array, region: Array) -> int:
    """Add to this rank's region what it has received, and return how many entries; none and `wire.BAD_PART` if it is wrong."""
    ops, world = bucket.ops, bucket.world
    if received.shape != message.shape or received.dtype != message.dtype:
        return wire.BAD_PART
    used = [-1 if rows is None else rows for rows in ops.rows_in_use(received, world, len(region))]
    if min(used) < 0:
        return wire.BAD_PART
    for part, rows in zip(wire.split(received, world), used, strict=True):
        # With many workers most parts are empty.
        if rows:
            ops.put(region, *ops.unpack(part, rows))
    return sum(used)
