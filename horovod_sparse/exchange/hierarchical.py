"""The hierarchical exchange: the workers of a host act as one. Imports no framework."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from horovod_sparse.exchange import regions, wire
from horovod_sparse.exchange.grid import Grid
from horovod_sparse.exchange.pairs import Pairs
from horovod_sparse.exchange.protocols import Collective, Exchange, Exchanging, Messages, Round, Run, Sender
from horovod_sparse.exchange.received import check_result, damaged, disagreement, rows_of
from horovod_sparse.ops.protocol import Array, Ops


@dataclass(frozen=True)
class Hierarchical(Exchange):
    """Each worker sums up its own part of the bucket for its host, and selects from that (`wire`, messages 7 to 10).

    So each host sends the pairs of one worker, however many workers it has. What is not sent stays with the owner of the part.
    All hosts must have the same number of workers.

    Args:
        workers_per_host: so many consecutive workers, >= 2, count as a host; None for those that run on the same host.
        between: what travels between hosts.
    """

    workers_per_host: int | None = None
    between: Pairs = field(default_factory=Pairs)

    title = "hierarchical"
    owns_parts = True

    def __post_init__(self) -> None:
        number = self.workers_per_host
        if number is not None and not (isinstance(number, int) and number >= 2):
            error = ValueError if isinstance(number, int) else TypeError
            raise error(f"workers_per_host must be an int >= 2 or None, got {number!r}")
        if not isinstance(self.between, Pairs):
            raise TypeError(f"between must be Pairs, such as Pairs('packed'), got {self.between!r}")

    def rounds(self, numel: int, k: int, capacity: int, world: int) -> Sequence[Round]:
        # How many hosts there are is not known here. No more bytes leave a host than if each worker had one of its own.
        between = Round("alltoall", world * self.between.rounds(numel, k, capacity, world)[0].length)
        return [Round("alltoall", 0, None), between, Round("alltoall", 0), Round("allgather", 1)]

    def hosts(self, world: int, gather: Callable[[str], Sequence[str]]) -> list[str]:
        if self.workers_per_host is None:
            return [*gather(socket.gethostname())]
        return [f"group {position // self.workers_per_host}" for position in range(world)]

    def collectives(self, bucket: Sender, run: Run) -> Exchanging:
        grid, ops = bucket.grid, bucket.ops
        assert grid is not None
        bounds = regions.uniform(bucket.numel, grid.slots)
        run.place = slice(bounds[grid.slot], bounds[grid.slot + 1])
        sizes = [after - first for first, after in itertools.pairwise(bounds)]
        mine = [sizes[grid.slot]] * grid.slots
        values = bucket.take_all()
        to, of = grid.lengths(grid.neighbours, sizes), grid.lengths(grid.neighbours, mine)
        received = yield Collective("alltoall", values, to, of, grid.neighbours)
        # An error before the last collective would leave other ranks waiting: it tells them, and all raise.
        fits = received.shape == (sum(mine),) and received.dtype == values.dtype
        pairs = _message(bucket, grid, run, received.reshape(grid.slots, mine[0]) if fits else None)
        message = self.between.packed(ops, run.after, pairs)
        rows = grid.lengths(grid.peers, [len(message)] * grid.hosts)
        of_shard = yield Collective("alltoall", _repeated(ops, message, grid.hosts), rows, rows, grid.neighbours)
        if of_shard.shape != (grid.hosts * len(message), *message.shape[1:]) or of_shard.dtype != message.dtype:
            of_shard, fits = _repeated(ops, message, grid.hosts), False
        of_shard = ops.copy(self.between.unpacked(ops, of_shard, grid.hosts, mine[0]))
        # Within the host, positions are those in the bucket.
        of_shard[:, 0] += (of_shard[:, 0] >= 0) * run.place.start
        rows = grid.lengths(grid.neighbours, [len(of_shard)] * grid.slots)
        gathered = yield Collective("alltoall", _repeated(ops, of_shard, grid.slots), rows, rows, grid.neighbours)
        fits = fits and gathered.shape == (grid.slots * len(of_shard), 2) and gathered.dtype == message.dtype
        # Each rank has copies of its own.
        digest = ops.copy(pairs[:1, 0])
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
        messages = list(zip(wire.split(gathered, bucket.world), used, strict=True))
        of_host = messages[grid.peers.index(bucket.position) :: grid.hosts]
        run.masked = [ops.unpack(*pair)[0] for pair in of_host]
        return Messages(gathered, used)


def _message(bucket: Sender, grid: Grid, run: Run, parts: Array | None) -> Array:
    """Add up the parts of this rank's shard (None if they are of no use), select, and return the pairs for one host."""
    ops, slots = bucket.ops, grid.slots
    shard = ops.copy(bucket.buffer[run.place])
    # The first part is added like the others: it may hold NaN, which must not reach the residual.
    shard[:] = 0
    overflows = [] if parts is None else [ops.accumulate(shard, [(0, part)]) for part in parts if len(part)]
    k = regions.forwarded(bucket.k, slots)
    # All slots have room for as many.
    capacity = bucket.capacity_for(-(-bucket.numel // slots), k)
    is_finite = parts is not None and bucket.finite and not any(map(any, overflows))
    most = min(capacity, len(shard)) if is_finite else 0
    selection = bucket.select_from(shard, min(k, most), most)
    run.after = shard
    indices = selection.indices
    bucket.sent(len(indices), selection.found - len(indices), k)
    message = ops.take_pairs(shard, indices, capacity)
    if not is_finite:
        message[0, 0] = wire.NOT_FINITE
    return message


def _repeated(ops: Ops, message: Array, times: int) -> Array:
    """Return a message of pairs `times` times, one after the other."""
    return message[ops.indices(np.tile(np.arange(len(message)), times), message)]
