"""How the ranks' selections become one reduced gradient. Imports no framework.

An exchange is a generator: it yields the collectives that it needs, one after the other, and is sent their results. The
adapter decides when to start a collective and when to wait. It can advance all buckets before it waits for the first again.

Every rank gets the same result to the last bit: gathered values are added rank by rank, and an allreduce gives all ranks
the same sums. A rank whose gradient is not finite still takes part and says so; then all ranks return None. What was taken
out of the residual counts as sent only when the whole step has succeeded. Otherwise it returns to the residual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from horovod_sparse.exchange import wire
from horovod_sparse.ops.protocol import Array, Ops, Part, Selection


class Collective(NamedTuple):
    """What an exchange asks the adapter for."""

    kind: Literal["allgather", "allreduce"]
    """The result: "allgather" gives all ranks' messages one after the other in rank order, "allreduce" gives their sum."""
    message: Array
    """This rank's message, of the same shape on every rank. It belongs to the adapter, which may reduce in place."""


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


class Sender(Protocol):
    """One bucket of this rank in one step, as an exchange sees it. `take` and `message` take entries out of the residual."""

    ops: Ops
    name: str
    numel: int
    """Number of entries of the bucket."""
    capacity: int
    """Rows of this rank's message."""
    world: int
    rank: int

    @property
    def finite(self) -> bool:
        """Whether all of this rank's gradients are finite."""

    def message(self) -> Array:
        """Select, and return the message of pairs with what was selected."""

    def finish(self) -> None:
        """Wait for the selection that `message` has begun, and learn from it."""

    def select(self) -> Selection:
        """Return the selection. Nothing is taken."""

    def take(self, indices: Array) -> Array:
        """Take the values at `indices` and return them."""

    def take_all(self) -> Array:
        """Return all values: the bucket's own memory, which becomes zero when the step succeeds."""

    def drop_rest(self) -> None:
        """Set the residual to zero if it is not kept from step to step."""

    def sent(self, count: int, truncated: int = 0) -> None:
        """Record how many entries are sent, and how many had no room."""

    def checksum(self) -> int:
        """Return 31 bits that must be equal on all ranks, so that they can send values without indices."""

    def proposal(self) -> float:
        """Return a number of this rank that all ranks get to know."""

    def observe(self, count: int, proposed: list[float]) -> None:
        """Take in how many entries all ranks sent together and what they proposed."""


Exchange = Callable[[Sender], Generator[Collective, Any, Sent]]
"""A generator function that returns what all ranks sent, or None if a rank's gradient was not finite."""


def sparse_allgather(bucket: Sender) -> Generator[Collective, Any, Sent]:
    """Exchange every rank's own entries, by one allgather of (index, value) pairs (`wire`, message 1)."""
    message = bucket.message()
    gathered = yield Collective("allgather", message)
    # A device may have made the message while the host went on.
    bucket.finish()
    _check_length(bucket, gathered, message)
    used = rows_of(bucket, gathered, bucket.world)
    return None if used is None else Messages(gathered, used)


def shared_indices(bucket: Sender) -> Generator[Collective, Any, Sent]:
    """Exchange entries that all ranks choose alike, by one allreduce of their values (`wire`, message 2)."""
    indices = bucket.select().indices
    return (yield from _sum(bucket, indices, bucket.take(indices), bucket.capacity))


def dense(bucket: Sender) -> Generator[Collective, Any, Sent]:
    """Exchange everything, by one allreduce in the residual's own type (message 2 with all entries)."""
    return (yield from _sum(bucket, None, bucket.take_all(), bucket.numel))


def _sum(bucket: Sender, indices: Array | None, values: Array, length: int) -> Generator[Collective, Any, Sent]:
    """Exchange the values at indices that all ranks know, as message 2."""
    bucket.sent(len(values))
    tail = wire.tail(bucket.finite, bucket.checksum())
    total = yield Collective("allreduce", bucket.ops.pack_values(values, length, tail))
    bad, *bits = bucket.ops.numbers(total[length:])
    # `bits` holds the sum of each bit of the checksum over the ranks.
    if any(bit not in (0.0, float(bucket.world)) for bit in bits):
        raise disagreement(bucket)
    return None if bad else Entries(indices, total[: len(values)])


def union(bucket: Sender) -> Generator[Collective, Any, Sent]:
    """Exchange the union of all ranks' entries: allgather indices (message 3), then allreduce all ranks' values there."""
    ops = bucket.ops
    selection = bucket.select()
    header = [bucket.checksum() if bucket.finite else wire.NOT_FINITE, wire.float_bits(bucket.proposal())]
    message = ops.pack_indices(selection.indices, header, bucket.capacity)
    gathered = yield Collective("allgather", message)
    _check_length(bucket, gathered, message)
    messages = ops.split(gathered, bucket.world)
    headers = [[int(number) for number in ops.numbers(message[: wire.HEADER])] for message in messages]
    if any(checksum == wire.NOT_FINITE for checksum, _ in headers):
        bucket.drop_rest()
        return None
    if len({checksum for checksum, _ in headers}) > 1:
        raise disagreement(bucket)
    parts = [message[wire.HEADER :] for message in messages]
    for sender, part in enumerate(parts):
        if ops.rows_in_use(part, 1, bucket.numel)[0] in (None, wire.NOT_FINITE):
            raise _damage(bucket, part, sender)
    indices = ops.union(parts)
    bucket.sent(len(indices), selection.found - len(selection.indices))
    bucket.observe(len(indices), [wire.float_of(bits) for _, bits in headers])
    room = min(bucket.capacity * bucket.world, bucket.numel)
    total = yield Collective("allreduce", ops.pack_values(bucket.take(indices), room, []))
    return Entries(indices, total[: len(indices)])


class Round(NamedTuple):
    """What is known of one collective of an exchange before the first step."""

    kind: Literal["allgather", "allreduce"]
    dtype: str | None
    """Type of the message; None for the residual's own type."""


ROUNDS: dict[Exchange, tuple[Round, ...]] = {
    sparse_allgather: (Round("allgather", "int32"),),
    shared_indices: (Round("allreduce", "float32"),),
    dense: (Round("allreduce", None),),
    union: (Round("allgather", "int32"), Round("allreduce", "float32")),
}
"""All collectives that an exchange may ask for. If a gradient is not finite, it can end before the last one."""


def stands_in(used: Exchange, usual: Exchange) -> bool:
    """Return whether an exchange without a gather is used in place of one that begins with a gather."""
    return used is not usual and ROUNDS[usual][0].kind == "allgather" != ROUNDS[used][0].kind


# --- checks of what was received: errors are raised on every rank ---


def rows_of(bucket: Sender, messages: Array, world: int) -> list[int] | None:
    """Return how many rows of each message of pairs are in use, or None if a worker's gradient was not finite."""
    indices = messages[:, 0]
    rows: list[int] = []
    for sender, number in enumerate(bucket.ops.rows_in_use(indices, world, bucket.numel)):
        if number is None:
            raise _damage(bucket, bucket.ops.split(indices, world)[sender], sender)
        rows.append(number)
    return None if wire.NOT_FINITE in rows else rows


def _check_length(bucket: Sender, gathered: Array, message: Array) -> None:
    """Raise unless all messages are as long as this rank's. With a schedule, their room depends on the step."""
    if gathered.shape[0] != bucket.world * message.shape[0]:
        raise disagreement(bucket)


def _damage(bucket: Sender, indices: Array, sender: int) -> RuntimeError:
    what = wire.flaw([int(index) for index in bucket.ops.numbers(indices)], bucket.numel)
    return RuntimeError(
        f"rank {bucket.rank}: the message of worker {sender} for bucket {bucket.name!r} is damaged: {what}. The "
        "ranks run different models or different versions of horovod_sparse"
    )


def disagreement(bucket: Sender) -> RuntimeError:
    """Return the error for ranks whose steps, adaptive numbers or random choices differ."""
    return RuntimeError(
        f"rank {bucket.rank}: the ranks disagree on the state of bucket {bucket.name!r} (step, seed or threshold), so "
        "their values would not belong to the same entries. After a restart load the compression state on every "
        "rank or on none, and run the same release of NumPy and horovod_sparse everywhere"
    )


class Reduced:
    """What all ranks sent of a bucket. `write` adds it up, divided by `divisor`."""

    def __init__(self, ops: Ops, sent: Sent, divisor: float) -> None:
        self._ops = ops
        self._divisor = divisor
        self._sum: Array | None = None
        self._messages: Messages | None = None
        if isinstance(sent, Entries) and sent.indices is None:
            self._sum = sent.values
        elif isinstance(sent, Entries):
            count = len(sent.values)
            # The message has at least one row, as all others do.
            self._messages = Messages(ops.pack(*sent, max(count, 1)), [count])
        else:
            self._messages = sent
        if self._messages is not None:
            self._assemble = ops.assembler(*self._messages, divisor)

    def parts(self) -> list[Entries]:
        """Return what is added up, part by part and not divided. It is made on each call."""
        if self._messages is None:
            return [] if self._sum is None else [Entries(None, self._sum)]
        split = self._ops.split(self._messages.gathered, len(self._messages.used))
        pairs = zip(split, self._messages.used, strict=True)
        return [Entries(*self._ops.unpack(message, rows)) for message, rows in pairs]

    def write(self, parts: Sequence[Part]) -> None:
        """Write the sum, in rank order, to parts of the bucket (flat arrays); NaN if a rank's gradient was not finite."""
        if self._messages is not None:
            self._assemble(parts)
            return
        for first, target in parts:
            if self._sum is None:
                target[:] = math.nan
            else:
                self._ops.assign(target, self._sum[first : first + len(target)])
                if self._divisor != 1.0:
                    target /= self._divisor
