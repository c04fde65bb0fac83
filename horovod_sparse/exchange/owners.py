"""Exchanges in which each rank owns a part of the bucket: of all ranks, or of those of its host. Imports no framework.

An owner sums up what others have sent, and keeps in its own residual what it does not send on. What an alltoall brings, only
its receiver sees. If that is wrong, the receiver tells the others with the last collective, and then all ranks raise.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Any

import numpy as np

from horovod_sparse.exchange import regions, wire
from horovod_sparse.exchange.protocols import (
    Collective,
    Messages,
    Sender,
    Sent,
    check_result,
    damaged,
    disagreement,
    rows_of,
)
from horovod_sparse.ops.protocol import Array, Ops


def balanced(bucket: Sender) -> Generator[Collective, Any, Sent]:
    """Exchange about k entries for any number of ranks: alltoall to the owners of the regions, allgather of their sums.

    Each rank adds what it has received to its own residual there, forwards the largest sums, and keeps the others (`wire`,
    messages 5 and 6; after Ok-Topk, https://arxiv.org/abs/2201.07598).
    """
    world = bucket.world
    message = bucket.message_to_regions(regions.room(bucket.capacity, world))
    received = yield Collective("alltoall", message)
    # Whatever is wrong, the other ranks are told: an error here would leave them waiting.
    region = bucket.region()
    count = _add_parts(bucket, received, message, region)
    is_finite = bucket.finite and bucket.ops.all_finite(region)
    message = bucket.forward(region, regions.forwarded(bucket.k, world))
    message[-1, 0] = regions.checksum(bucket.bounds) if is_finite else wire.NOT_FINITE
    message[-1, 1] = count
    gathered = yield Collective("allgather", message)
    check_result(bucket, gathered, (world * len(message), 2), message.dtype)
    messages = gathered.reshape(world, -1, 2)
    checksums, counts = zip(*messages[:, -1].tolist(), strict=True)
    if wire.NOT_FINITE in checksums:
        bucket.drop_rest()
        return None
    if len(set(checksums)) > 1:
        raise disagreement(bucket)
    if min(counts) < 0:
        bad = f"message to worker {counts.index(min(counts))}"
        raise damaged(bucket, bad, "its indices do not ascend within the worker's region")
    pairs = messages[:, :-1].reshape(-1, 2)
    rows = rows_of(bucket, pairs, world)
    if rows is None:
        return None
    bucket.balance([*counts])
    return Messages(pairs, rows)


def hierarchical(bucket: Sender) -> Generator[Collective, Any, Sent]:
    """Exchange as one worker per host: each rank sums up a shard for its host and selects from it (`wire`, messages 7 to 10).

    What leaves a host is what one worker of `sparse_allgather` would send. What is not sent stays with the owner of the shard.
    """
    ops, grid = bucket.ops, bucket.grid
    sizes = [after - first for first, after in itertools.pairwise(grid.shards(bucket.numel))]
    mine = [sizes[grid.slot]] * grid.slots
    values = bucket.take_all()
    received = yield Collective(
        "alltoall", values, grid.lengths(grid.neighbours, sizes), grid.lengths(grid.neighbours, mine)
    )
    # An error before the last collective would leave other ranks waiting: it tells them, and all raise.
    fits = received.shape == (sum(mine),) and received.dtype == values.dtype
    message = bucket.message_of_shard(received if fits else None)
    rows = grid.lengths(grid.peers, [len(message)] * grid.hosts)
    of_shard = yield Collective("alltoall", _repeated(ops, message, grid.hosts), rows, rows)
    if of_shard.shape != (grid.hosts * len(message), 2) or of_shard.dtype != message.dtype:
        of_shard, fits = _repeated(ops, message, grid.hosts), False
    rows = grid.lengths(grid.neighbours, [len(of_shard)] * grid.slots)
    gathered = yield Collective("alltoall", _repeated(ops, of_shard, grid.slots), rows, rows)
    fits = fits and gathered.shape == (grid.slots * len(of_shard), 2) and gathered.dtype == message.dtype
    # Each rank has copies of its own.
    digest = ops.copy(message[:1, 0])
    digest[0] = wire.digest(gathered) if fits else wire.BAD_PART
    digests = yield Collective("allgather", digest)
    check_result(bucket, digests, (bucket.world,), message.dtype)
    known = digests.tolist()
    if not fits or wire.BAD_PART in known:
        raise disagreement(bucket)
    if len(set(known)) > 1:
        other = next(rank for rank, one in enumerate(known) if one != known[0])
        raise damaged(bucket, "message of a host", f"worker {other} has received another copy than worker 0")
    used = rows_of(bucket, gathered, bucket.world)
    if used is None:
        return None
    pairs = list(zip(wire.split(gathered, bucket.world), used, strict=True))
    of_host = pairs[grid.peers.index(bucket.position) :: grid.hosts]
    bucket.host_sent([ops.unpack(*pair)[0] for pair in of_host])
    return Messages(gathered, used)


def _repeated(ops: Ops, message: Array, times: int) -> Array:
    """Return a message of pairs `times` times, one after the other."""
    return message[ops.indices(np.tile(np.arange(len(message)), times), message)]


def _add_parts(bucket: Sender, received: Array, message: Array, region: Array) -> int:
    """Add to this rank's region what it has received, in answer to `message`. Return how many entries these are.

    If something is not as `wire` requires, nothing is added, and the number is `wire.BAD_PART`. Only this rank knows it.
    """
    ops, world = bucket.ops, bucket.world
    if received.shape != message.shape or received.dtype != message.dtype:
        return wire.BAD_PART
    used = [-1 if rows is None else rows for rows in ops.rows_in_use(received, world, len(region))]
    if min(used) < 0:
        return wire.BAD_PART
    for part, rows in zip(wire.split(received, world), used, strict=True):
        ops.put(region, *ops.unpack(part, rows))
    return sum(used)
