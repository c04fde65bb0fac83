"""How long collectives take: the alpha-beta model, and the collectives of each exchange. Plain arithmetic, no framework.

A collective of n workers is a number of messages one after the other, in a ring. A message of m bytes takes `alpha + m/B`.
Horovod looks for collectives once in a cycle, so each round of them also waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from horovod_sparse.exchange import cost, regions, wire
from horovod_sparse.exchange.protocols import Kind

CYCLE = 0.001
"""Horovod's default cycle in seconds (`HOROVOD_CYCLE_TIME`)."""
FUSION_BYTES = 128 * 2**20
"""Bytes that Horovod reduces together by default (`HOROVOD_FUSION_THRESHOLD`)."""
LATENCY = 50e-6
"""Seconds of a message, if nobody says otherwise; about what TCP takes within a data centre."""
PAIR = 2
"""Numbers in a row of messages 1, 5 and 6."""


class Call(NamedTuple):
    """One collective of a step."""

    kind: Kind
    length: int
    """Numbers in this worker's message."""
    itemsize: int = 4
    """Bytes of a number."""

    def bytes_sent(self, world: int) -> float:
        """Return the bytes that each of `world` workers sends."""
        return cost.BYTES[self.kind](self.itemsize * self.length, world)

    def messages(self, world: int) -> int:
        """Return the number of messages that each of `world` workers sends one after the other."""
        # An allreduce is a reduce-scatter and an allgather. Before an alltoall, Horovod exchanges how long the parts are.
        return (world - 1) * (1 if self.kind == "allgather" else 2)


Rounds = Sequence[Sequence[Call]]
"""The collectives of a step. Those of one round do not wait for each other; a round waits for the one before."""


@dataclass(frozen=True)
class Network:
    """A network that joins workers, with one card each.

    Args:
        latency: alpha, seconds that a message takes beyond its bytes, >= 0.
        bandwidth: B, bytes per second of one worker in each direction, > 0.
        wait: seconds from handing a collective to Horovod to its first message, >= 0. At a random time half of Horovod's
            cycle is left, and the workers then agree on what is ready.

    Raises:
        ValueError: a number is outside of its range.
    """

    latency: float
    bandwidth: float
    wait: float = CYCLE / 2

    def __post_init__(self) -> None:
        for name, least in (("latency", self.latency), ("wait", self.wait)):
            if not 0.0 <= least < math.inf:
                raise ValueError(f"{name} must be a finite number of seconds >= 0, got {least!r}")
        if not 0.0 < self.bandwidth < math.inf:
            raise ValueError(f"bandwidth must be a finite number of bytes per second > 0, got {self.bandwidth!r}")

    def seconds(self, rounds: Rounds, world: int) -> float:
        """Return how long rounds of collectives take with `world` workers.

        `sum over rounds of (wait + sum over its collectives of (messages * latency + bytes sent / bandwidth))`. In a ring all
        workers send and receive at the same time, so only one direction counts.
        """
        calls = [call for together in rounds for call in together]
        messages = sum(call.messages(world) for call in calls)
        sent = sum(call.bytes_sent(world) for call in calls)
        return len(rounds) * self.wait + messages * self.latency + sent / self.bandwidth


def dense(numel: int, itemsize: int) -> list[Call]:
    """Return the allreduces of `numel` numbers of `itemsize` bytes, as many together as Horovod fuses."""
    most = FUSION_BYTES // itemsize
    return [Call("allreduce", min(most, numel - start), itemsize) for start in range(0, numel, most)]


def pairs(capacity: int) -> list[Call]:
    """Return the collectives of one bucket with pairs (`wire`, message 1), one for each round."""
    return [Call("allgather", PAIR * capacity)]


def compact_pairs(numel: int, capacity: int) -> list[Call]:
    """Return the collectives of one bucket with compact pairs (`wire`, message 4)."""
    return [Call("allgather", wire.runs_of(numel) + capacity)]


def balanced(k: int, capacity: int, world: int) -> list[Call]:
    """Return the collectives of one bucket with the balanced exchange (`wire`, messages 5 and 6)."""
    room, forwarded = regions.room(capacity, world), regions.forwarded(k, world)
    return [Call("alltoall", PAIR * world * room), Call("allgather", PAIR * (forwarded + 1))]


def union(numel: int, capacity: int, world: int) -> list[Call]:
    """Return the collectives of one bucket with the union of all workers' entries (`wire`, messages 3 and 2)."""
    return [Call("allgather", wire.HEADER + capacity), Call("allreduce", min(world * capacity, numel))]


def shared_indices(capacity: int) -> list[Call]:
    """Return the collectives of one bucket whose indices all workers know (`wire`, message 2)."""
    return [Call("allreduce", capacity + len(wire.tail(finite=True, checksum=0)))]
