"""What is known of the collectives of each exchange before the first step. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from horovod_sparse.exchange import cost, regions, wire
from horovod_sparse.exchange.owners import balanced, hierarchical
from horovod_sparse.exchange.protocols import Exchange, Kind, dense, shared_indices, sparse_allgather, union
from horovod_sparse.ops.protocol import Values


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


class Round(NamedTuple):
    """What is known of one collective of an exchange before the first step."""

    kind: Kind
    dtype: str | None
    """Type of the message; None for the residual's own type."""


ROUNDS: dict[Exchange, tuple[Round, ...]] = {
    sparse_allgather: (Round("allgather", "int32"),),
    shared_indices: (Round("allreduce", "float32"),),
    dense: (Round("allreduce", None),),
    union: (Round("allgather", "int32"), Round("allreduce", "float32")),
    balanced: (Round("alltoall", "int32"), Round("allgather", "int32")),
    hierarchical: (Round("alltoall", None), *[Round("alltoall", "int32")] * 2, Round("allgather", "int32")),
}
"""All collectives that an exchange may ask for. If a gradient is not finite, it can end before the last one."""


TITLES: dict[Exchange, str] = {sparse_allgather: "pairs", shared_indices: "shared indices"}
"""The names in statistics of exchanges whose functions have another one."""


class Way(NamedTuple):
    """How a bucket is exchanged in a step."""

    exchange: Exchange
    values: Values = "float32"
    """The type of the values in messages of pairs. If it has 16 bits, they are compact (`wire`, message 4)."""

    @property
    def title(self) -> str:
        """The name in statistics: mostly that of the function, as for a user's own exchange."""
        name = TITLES.get(self.exchange, getattr(self.exchange, "__name__", repr(self.exchange)))
        return name if self.values == "float32" else f"compact {name}"


_CALLS: Mapping[str, Callable[[int, int, int, int], list[Call]]] = {
    "pairs": lambda numel, k, room, world: [Call("allgather", 2 * room)],
    "compact pairs": lambda numel, k, room, world: [Call("allgather", wire.runs_of(numel) + room)],
    "shared indices": lambda numel, k, room, world: [Call("allreduce", room + len(wire.tail(True, 0)))],
    "dense": lambda numel, k, room, world: [Call("allreduce", numel + len(wire.tail(True, 0)))],
    "union": lambda numel, k, room, world: [
        Call("allgather", wire.HEADER + room),
        Call("allreduce", min(world * room, numel)),
    ],
    "balanced": lambda numel, k, room, world: [
        Call("alltoall", 2 * world * regions.room(room, world)),
        Call("allgather", 2 * (regions.forwarded(k, world) + 1)),
    ],
    # Between hosts at most. How many there are is not known here.
    "hierarchical": lambda numel, k, room, world: [Call("allgather", 2 * room)],
}


def calls(way: Way, numel: int, k: int, capacity: int, world: int) -> list[Call] | None:
    """Return the collectives of a bucket, one after the other; None for a user's own exchange (messages: `wire`)."""
    known = _CALLS.get(way.title)
    return None if known is None else known(numel, k, capacity, world)


EXAMPLE = (
    'exchange.rounds = (Round("allgather", "int32"),), with all of its collectives (horovod_sparse.exchange.rounds)'
)
"""How a user says the collectives of an exchange."""


def rounds_of(exchange: Exchange) -> tuple[Round, ...] | None:
    """Return all collectives of an exchange. A user's own may say them in its attribute `rounds`; else they are not known."""
    return ROUNDS.get(exchange) or getattr(exchange, "rounds", None)


def stands_in(used: Exchange, usual: Exchange) -> Kind | None:
    """Return the first collective of an exchange if another one, which begins differently, is used in its place."""
    if used == usual:
        return None
    first, other = rounds_of(usual), rounds_of(used)
    assert first is not None and other is not None
    return first[0].kind if first[0].kind != other[0].kind else None


FROM_PARTS: tuple[Exchange, ...] = (balanced, hierarchical)
"""Exchanges that select from a part of the buffer, so that what is noted of the whole buffer is of no use."""
