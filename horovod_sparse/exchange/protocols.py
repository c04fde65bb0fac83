"""What an exchange is, and what it is made of. Imports no framework.

An exchange is a generator: it yields the collectives that it needs, one after the other, and is sent their results. The
adapter decides when to start a collective and when to wait. It can advance all buckets before it waits for the first again.

Every rank gets the same result to the last bit. A rank whose gradient is not finite still takes part and says so; then all
ranks return None. What was taken out of the residual counts as sent only when the whole step has succeeded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from horovod_sparse.exchange.cost import allreduce_bytes
from horovod_sparse.ops.protocol import Array, Ops, Part, Selection

Kind = Literal["allgather", "allreduce"]
Choice = Literal["own", "largest", "alike", "all"]
"""What a worker chooses: entries of its own; the largest; those that all choose; all entries."""


class Collective(NamedTuple):
    """What an exchange asks the adapter for."""

    kind: Kind
    """The result: "allgather" gives all ranks' messages one after the other in rank order, "allreduce" gives their sum."""
    message: Array
    """This rank's message, of the same shape on every rank. The adapter may reduce it in place."""


class Told(NamedTuple):
    """What an exchange asks the host to learn before it goes on: numbers in flat arrays, which may be on a device."""

    arrays: list[Array]
    """The answer is a list of numbers for each."""


class Round(NamedTuple):
    """What is known of one collective of an exchange before its first step."""

    kind: Kind
    length: int
    """Numbers in this worker's message."""
    dtype: str | None = "int32"
    """Type of the message; None for the residual's own type, which counts as float32."""

    def bytes_sent(self, world: int) -> float:
        """Return the bytes that each of `world` workers sends in a ring."""
        nbytes = np.dtype(self.dtype or "float32").itemsize * self.length
        return (world - 1) * nbytes if self.kind == "allgather" else allreduce_bytes(nbytes, world)

    def messages(self, world: int) -> int:
        """Return the number of messages that each of `world` workers sends one after the other."""
        # An allreduce is a reduce-scatter and an allgather.
        return (world - 1) * (1 if self.kind == "allgather" else 2)

    def gathered(self, world: int) -> int:
        """Return how many numbers a worker gets that are not sums."""
        return world * self.length if self.kind == "allgather" else 0


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


class Named(Protocol):
    """A bucket of a rank, for messages."""

    name: str
    rank: int


class Sender(Named, Protocol):
    """One bucket of this rank in one step, as an exchange sees it."""

    ops: Ops
    numel: int
    capacity: int
    """Rows of this rank's message."""
    world: int
    position: int
    """Index of this rank among those that exchange."""
    buffer: Array
    """The residual with the gradients of this step."""

    @property
    def step(self) -> int:
        """The number of this step, which must be the same on all ranks."""

    @property
    def finite(self) -> bool:
        """Whether all of this rank's gradients are finite, as far as the host knows."""

    def message(self) -> Array:
        """Select, take what was selected out of the residual, and return message 1 of `wire` with it."""

    def select(self) -> Selection:
        """Return the selection from the buffer. Nothing is taken."""

    def index_message(self) -> Array:
        """Select, and return message 3 of `wire` with the indices. Nothing is taken."""

    def union(self, gathered: Array) -> tuple[Array, Array]:
        """Return all indices in all ranks' messages 3, and for `Told` an array of their number and of all headers.

        The indices are those of `Ops.union`; on a device what is no index follows them, up to a number that all ranks know.
        The number is `wire.DAMAGED` if a message is not as `wire` requires.
        """

    def value_message(self, indices: Array | None, length: int, checksum: int | None) -> Array:
        """Take values out of the residual, and return message 2 of `wire` with them; without a checksum it has no tail.

        There are `length` values: those at `indices`, 0 for what is no index, and zeros after them. None stands for all
        entries, which become zero only when the step has succeeded.
        """

    def checksum(self) -> int:
        """Return 31 bits that must be equal on all ranks, so that they can send values without indices."""

    def observe(self, count: int, proposed: list[float]) -> None:
        """Take in how many entries all ranks send together, and what each rank has proposed."""


Asked = Collective | Told
Exchanging = Generator[Asked, Any, Sent]
"""Asks for a collective first, then for collectives and numbers. Returns what all ranks sent, or None if a rank's gradient
was not finite."""


class Exchange(ABC):
    """How the selections of all ranks become one gradient: a setting that never changes, and that ranks compare by `repr`."""

    needs: ClassVar[Choice] = "own"
    """What its compressor must be able to choose (`Compressor.chooses`)."""

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
    def collectives(self, bucket: Sender) -> Exchanging:
        """Exchange a bucket in a step."""


@dataclass(frozen=True)
class Reduced:
    """What all ranks sent of a bucket. `write` divides it by `divisor`, and parts by `rates`, by offset; 0 writes zero."""

    ops: Ops
    sent: Sent
    divisor: float
    rates: Mapping[int, float]

    def divisor_at(self, first: int) -> float:
        """Return the number by which the part that begins at an index is divided."""
        return self.divisor * (self.rates.get(first, 1.0) or math.inf)

    def write(self, parts: Sequence[Part]) -> None:
        """Write the sum, in rank order, to the parameters' parts (flat arrays); NaN if a rank's gradient was not finite."""
        sent = self.sent
        if isinstance(sent, Entries) and sent.indices is not None:
            count = len(sent.values)
            # The message has at least one row, as all others do.
            sent = Messages(self.ops.pack(*sent, max(count, 1)), [count])
        together: dict[float, list[Part]] = {} if self.rates else {self.divisor: [*parts]}
        for part in parts if self.rates else ():
            together.setdefault(self.divisor_at(part[0]), []).append(part)
        for divisor, some in together.items():
            if isinstance(sent, Messages):
                self.ops.assemble(some, *sent, divisor)
            elif sent is None:
                for _, target in some:
                    target[:] = math.nan
            else:
                self.ops.copy_parts(sent.values, some, divisor)
