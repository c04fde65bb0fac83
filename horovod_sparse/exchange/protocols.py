"""What an exchange is, and what it is made of. Imports no framework.

An exchange is a generator: it yields the collectives that it needs, one after the other, and is sent their results. The
adapter decides when to start a collective and when to wait. It can advance all buckets before it waits for the first again.

Every rank gets the same result to the last bit. A rank whose gradient is not finite still takes part and says so; then all
ranks return None. What was taken out of the residual counts as sent only when the whole step has succeeded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from horovod_sparse.exchange import cost
from horovod_sparse.exchange.grid import Grid
from horovod_sparse.ops.protocol import Array, Ops, Part, Selection

Kind = Literal["allgather", "allreduce", "alltoall"]
Choice = Literal["own", "spread", "largest", "alike", "all"]
"""What a worker chooses: entries of its own; spread over the bucket; the largest; those that all choose; all entries."""


class Collective(NamedTuple):
    """What an exchange asks the adapter for."""

    kind: Kind
    """The result: "allgather" gives all ranks' messages one after the other in rank order, "allreduce" gives their sum.

    "alltoall" gives one of the `world` equal parts of each rank's message, in rank order: the part for this rank.
    """
    message: Array
    """This rank's message, of the same shape on every rank unless `to` is given. The adapter may reduce it in place."""
    to: Sequence[int] | None = None
    """An alltoall with parts of different sizes: the number of rows for each rank. None for equal parts."""
    of: Sequence[int] | None = None
    """With `to`: the number of rows that this rank gets from each rank."""
    near: Collection[int] = ()
    """With `to`: the positions of the ranks on this rank's host. What goes to them does not leave it."""

    def bytes_sent(self, world: int) -> float:
        """Return the bytes that this rank sends."""
        if self.to is None:
            return cost.BYTES[self.kind](self.message.nbytes, world)
        leaving = sum(self.to) - sum(self.to[position] for position in self.near)
        return float(leaving * self.message.nbytes / len(self.message))


class Round(NamedTuple):
    """What is known of one collective of an exchange before its first step."""

    kind: Kind
    length: int
    """Numbers in this worker's message, as far as they leave its host."""
    dtype: str | None = "int32"
    """Type of the message; None for the residual's own type, which counts as float32."""

    def bytes_sent(self, world: int) -> float:
        """Return the bytes that each of `world` workers sends."""
        return cost.BYTES[self.kind](np.dtype(self.dtype or "float32").itemsize * self.length, world)

    def messages(self, world: int) -> int:
        """Return the number of messages that each of `world` workers sends one after the other."""
        # An allreduce is a reduce-scatter and an allgather. Before an alltoall, Horovod exchanges how long the parts are.
        return (world - 1) * (1 if self.kind == "allgather" else 2)

    def gathered(self, world: int) -> int:
        """Return how many numbers a worker gets that are not sums."""
        return {"allgather": world * self.length, "alltoall": self.length, "allreduce": 0}[self.kind]


class Entries(NamedTuple):
    """Entries of a flat array."""

    indices: Array | None
    """Indices, ascending and unique; None for all entries in order."""
    values: Array


class Messages(NamedTuple):
    """All ranks' messages of (index, value) pairs, in rank order."""

    gathered: Array
    used: list[int]
    """Number of rows in use in each message."""


Sent = Entries | Messages | None
"""What all ranks sent: the sum of their entries, or each rank's own entries; None if a rank's gradient was not finite."""


class State(Protocol):
    """What a bucket keeps from step to step, as an exchange sees it."""

    bounds: tuple[int, ...]
    """The bounds of regions; empty until the first step."""
    proposal: float
    """A number of this rank that all ranks get to know."""


class Named(Protocol):
    """A bucket of a rank, for messages."""

    name: str
    rank: int


class Sender(Named, Protocol):
    """One bucket of this rank in one step, as an exchange sees it. `take` and `message` take entries out of the residual."""

    ops: Ops
    numel: int
    capacity: int
    """Rows of this rank's message."""
    k: int
    """How many entries are wanted."""
    world: int
    position: int
    """Index of this rank among those that exchange."""
    grid: Grid | None
    """The hosts and slots of the ranks, if `Exchange.hosts` has named the hosts."""
    buffer: Array
    """The residual with the gradients of this step."""
    sparse_step: int
    """Number of this step, counted from the first that is not one of the dense steps."""

    @property
    def step(self) -> int:
        """The number of this step, which must be the same on all ranks."""

    @property
    def state(self) -> State:
        """What the bucket keeps from step to step."""

    @property
    def finite(self) -> bool:
        """Whether all of this rank's gradients are finite."""

    def message(self) -> Array:
        """Select, and return message 1 of `wire` with what was selected."""

    def finish(self) -> None:
        """Wait for the selection that `message` has begun, and learn from it."""

    def select(self) -> Selection:
        """Return the selection from the buffer. Nothing is taken."""

    def select_from(self, x: Array, k: int, capacity: int) -> Selection:
        """Return what the compressor selects from `x`, about k entries, at most `capacity`; nothing if k is 0."""

    def capacity_for(self, numel: int, k: int) -> int:
        """Return the capacity of a message with about k of so many entries."""

    def take(self, indices: Array) -> Array:
        """Take the values at `indices` and return them."""

    def take_all(self) -> Array:
        """Return all values: the bucket's own memory, which becomes zero when the step succeeds."""

    def drop_rest(self) -> None:
        """Set the residual to zero if it is not kept from step to step."""

    def sent(self, count: int, truncated: int = 0, target: int | None = None) -> None:
        """Record how many entries are sent, how many had no room, and how many were wanted, if that is not k."""

    def checksum(self) -> int:
        """Return 31 bits that must be equal on all ranks, so that they can send values without indices."""

    def observe(self, count: int, proposed: list[float]) -> None:
        """Take in how many entries all ranks send together, and what each rank has proposed."""


Exchanging = Generator[Collective, Any, Sent]
"""Asks for collectives, and returns what all ranks sent, or None if a rank's gradient was not finite."""


class Exchange(ABC):
    """How the selections of all ranks become one gradient: a setting that never changes, and that ranks compare by `repr`."""

    needs: ClassVar[Choice] = "own"
    """What its compressor must be able to choose (`Compressor.chooses`)."""
    owns_parts: ClassVar[bool] = False
    """Whether each rank owns a part of the bucket. It selects from a part, and its residual holds what others have sent."""

    @property
    def title(self) -> str:
        """The name in statistics."""
        return type(self).__name__

    @abstractmethod
    def rounds(self, numel: int, k: int, capacity: int, world: int) -> Sequence[Round]:
        """Return all collectives of a bucket, one after the other. Their kinds and types must not depend on the arguments.

        The bucket has `numel` entries, of which k are wanted; each of `world` workers has messages of `capacity` rows. If a
        gradient is not finite, an exchange can end before the last collective.
        """

    @abstractmethod
    def collectives(self, bucket: Sender, run: Run) -> Exchanging:
        """Exchange a bucket in a step. `run` takes what is to be done when the step ends, beside what `bucket.take` does."""

    def hosts(self, world: int, gather: Callable[[str], Sequence[str]]) -> list[str]:
        """Return the name of each worker's host, in the order of their positions; nothing if the exchange needs none.

        `gather` takes this worker's value, and returns that of each. It is called on all workers, or on none.
        """
        return []


class Run:
    """The exchange of one bucket in one step. `commit` or `restore` ends it; after an interrupt, it is called again."""

    def __init__(self, exchange: Exchange, bucket: Sender) -> None:
        self._bucket = bucket
        self.place = slice(0)
        """The part of the bucket that this rank owns, if it owns one."""
        self.before: Array | None = None
        """A copy of the residual there when the exchange began, if the buffer does not hold it."""
        self.after: Array | None = None
        """The residual there when the step succeeds."""
        self.masked: list[Array] | None = None
        """Indices of entries whose velocity is masked, if these are not the entries that were taken."""
        self.collectives = exchange.collectives(bucket, self)

    def commit(self) -> None:
        if self.after is not None:
            self._bucket.buffer[self.place] = self.after
            self._bucket.drop_rest()

    def restore(self) -> None:
        if self.before is not None:
            self._bucket.buffer[self.place] = self.before


class Reduced:
    """What all ranks sent of a bucket. `write` divides it by `divisor`, and parts by `rates`, by offset; 0 writes zero."""

    def __init__(self, ops: Ops, sent: Sent, divisor: float, rates: Mapping[int, float]) -> None:
        self._ops = ops
        self._divisor, self._rates = divisor, rates
        if isinstance(sent, Entries) and sent.indices is not None:
            count = len(sent.values)
            # The message has at least one row, as all others do.
            sent = Messages(ops.pack(*sent, max(count, 1)), [count])
        self.sent = sent
        """What is added up, as `Messages` if not all entries were sent."""

    def divisor_at(self, first: int) -> float:
        """Return the number by which the part that begins at an index is divided."""
        return self._divisor * (self._rates.get(first, 1.0) or math.inf)

    def write(self, parts: Sequence[Part]) -> None:
        """Write the sum, in rank order, to the parameters' parts (flat arrays); NaN if a rank's gradient was not finite."""
        together: dict[float, list[Part]] = {} if self._rates else {self._divisor: [*parts]}
        for part in parts if self._rates else ():
            together.setdefault(self.divisor_at(part[0]), []).append(part)
        for divisor, some in together.items():
            if isinstance(self.sent, Messages):
                self._ops.assembler(*self.sent, divisor)(some)
            elif self.sent is None:
                for _, target in some:
                    target[:] = math.nan
            else:
                self._ops.copy_parts(self.sent.values, some)
                if divisor != 1.0:
                    for _, target in some:
                        target /= divisor
