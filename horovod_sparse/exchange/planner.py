"""Which exchange is the fastest for a bucket: predicted from its size, the network and the workers' speed. No framework.

The same numbers give the same plan on every rank, because only Python's floats are added and multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

from horovod_sparse.exchange import network, owners, protocols, regions, wire
from horovod_sparse.exchange.network import Network, Rounds
from horovod_sparse.exchange.rounds import Way

PAIRS = Way(protocols.sparse_allgather)
COMPACT = Way(protocols.sparse_allgather, "bfloat16")
BALANCED = Way(owners.balanced)
HALF = Way(protocols.half)


class Costs(NamedTuple):
    """Seconds that a worker computes for an exchange, beyond what all exchanges need."""

    select: float
    """For each entry of the bucket: to select from it, and to begin the reduced gradient."""
    row: float
    """For each row of the messages of pairs that a worker receives: to add it up."""
    compact: float
    """For each row of compact messages that a worker receives: to make it, and to expand it."""
    half: float
    """For each entry of the bucket: to round it to half precision, and to write the sum."""
    balanced: float
    """For each entry of the bucket: what the balanced exchange needs instead of `select`."""
    owned: float
    """For each row of pairs that a worker receives in the balanced exchange: what is needed instead of `row`."""


TYPICAL = Costs(select=1.0e-9, row=1.4e-9, compact=2.4e-9, half=1.2e-9, balanced=3.5e-9, owned=17e-9)
"""About what one core of a server takes, where nothing was measured; `benchmarks/costs.py` prints what yours takes."""


class Conditions(NamedTuple):
    """What a plan depends on beside the bucket. It must be the same on all ranks."""

    network: Network
    costs: Costs = TYPICAL


class Planner:
    """Chooses how buckets are exchanged, for a compressor that sends pairs.

    Args:
        conditions: the network and the costs, the same on all ranks.
        world: the number of workers, >= 1.
        balances: whether the balanced exchange may be chosen.
    """

    def __init__(self, conditions: Conditions, world: int, *, balances: bool) -> None:
        self.conditions = conditions
        self.world = world
        self.ways = [PAIRS, COMPACT]
        """What is chosen from. Of ways that take the same time, the first one is chosen."""
        if balances:
            self.ways.append(BALANCED)
        if world <= wire.MOST_HALF_WORKERS:
            self.ways.append(HALF)
        self._known: dict[tuple[int, int, int], Way] = {}

    def fastest(self, numel: int, k: int, capacity: int) -> Way:
        """Return the way that takes the least time for a bucket of `numel` entries.

        Args:
            numel: the number of entries, >= 1.
            k: how many of them are wanted, in [1, numel].
            capacity: how many of them a worker's message has room for, in [k, numel].
        """
        bucket = numel, k, capacity
        if bucket not in self._known:
            self._known[bucket] = min(self.ways, key=lambda way: self.seconds(way, *bucket))
        return self._known[bucket]

    def seconds(self, way: Way, numel: int, k: int, capacity: int) -> float:
        """Return how long a bucket takes, from its last gradient to its reduced one, if it is alone."""
        where, costs, world = self.conditions.network, self.conditions.costs, self.world
        sent = where.seconds(_rounds(way, numel, k, capacity, world), world)
        if way.exchange is protocols.half:
            return sent + costs.half * numel
        rows = rows_received(way, k, capacity, world)
        if way.exchange is owners.balanced:
            return sent + costs.balanced * numel + costs.owned * rows
        row = costs.row + (costs.compact if way.is_compact else 0.0)
        return sent + costs.select * numel + row * rows


def rows_received(way: Way, k: int, capacity: int, world: int) -> int:
    """Return how many rows of pairs a worker receives of one bucket."""
    if way.exchange is owners.balanced:
        return world * (regions.room(capacity, world) + regions.forwarded(k, world))
    return world * capacity


def _rounds(way: Way, numel: int, k: int, capacity: int, world: int) -> Rounds:
    """Return the collectives of one bucket."""
    if way.exchange is protocols.half:
        calls = network.half(numel)
    elif way.exchange is owners.balanced:
        calls = network.balanced(k, capacity, world)
    else:
        calls = network.compact_pairs(numel, capacity) if way.is_compact else network.pairs(capacity)
    return [[call] for call in calls]
