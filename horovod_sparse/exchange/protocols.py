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
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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


@dataclass
class Task:
    """One bucket's step, as an exchange sees it."""

    ops: Ops
    bucket: str
    buffer: Array
    """Residual plus gradient; what is taken out of it becomes zero."""
    velocity: Array | None
    """The velocity, with momentum correction and masking; else None. It becomes zero where entries were sent."""
    capacity: int
    """Rows of this rank's message."""
    world: int
    rank: int
    asked: int
    """k, as the statistics show it."""
    finite: bool
    residual: bool
    select: Callable[[], Selection]
    checksum: Callable[[], int]
    """Returns 31 bits that must be equal on all ranks, so that they can send values without indices."""
    propose: Callable[[], float]
    """Returns a number of this rank that all ranks get to know (exchange `union`)."""
    observe: Callable[[int, list[float]], None]
    """Takes in how many entries all ranks sent together and what they proposed (exchange `union`)."""
    launch: Callable[[], Array]
    """Replaces `select`: returns the message that the device is making (exchange `launched`)."""
    learn: Callable[[], tuple[int, int]]
    """Waits for the device. Returns how many entries were sent and how many had no room (exchange `launched`)."""
    count: int = 0
    """Entries sent by this rank."""
    overflow: int = 0
    """Entries that qualified but had no room."""
    _taken: Entries | None = None
    _message: Array | None = None
    """The message with what the device has taken, as long as its number of entries is not known (exchange `launched`)."""

    def take(self, indices: Array) -> Array:
        """Take the values at `indices` out of the residual and return them. If the step fails, they return to the residual."""
        values = self.ops.take(self.buffer, indices)
        self._taken = Entries(indices, values)
        self.drop()
        return values

    def take_all(self) -> Array:
        """Return all values: the buffer itself, which becomes zero when the step succeeds."""
        self._taken = Entries(None, self.buffer)
        return self.buffer

    def take_message(self) -> Array:
        """Return the message that the device is making. As with `take`, its entries are no longer in the residual."""
        self._message = self.launch()
        self.drop()
        return self._message

    def _pop(self) -> Entries | None:
        """Return what was taken, and forget it."""
        taken, message = self._taken, self._message
        self._taken = self._message = None
        if message is not None:
            rows = self.rows_of(message, 1)
            taken = None if rows is None else Entries(*self.ops.unpack(message, rows[0]))
        return taken

    def drop(self) -> None:
        """Zero the buffer if `residual` is False. Then nothing is kept, not even from a step that fails."""
        if not self.residual:
            self.buffer[:] = 0

    def succeed(self) -> None:
        """End a step that succeeded on every rank: what was taken is sent."""
        everything = self._taken is not None and self._taken.indices is None
        taken = self._pop() if self.velocity is not None or everything else None
        if everything:
            self.buffer[:] = 0
        if self.velocity is not None and taken is not None:
            self.velocity[slice(None) if taken.indices is None else taken.indices] = 0
        self._taken = self._message = None

    def fail(self) -> None:
        """End a step that failed on some rank: what was taken returns to the residual."""
        taken = self._pop()
        if not self.residual:
            self.buffer[:] = 0
        elif taken is not None and taken.indices is not None:
            self.ops.scatter_add(self.buffer, taken.indices, taken.values)

    def check_length(self, gathered: Array, message: Array) -> None:
        """Raise unless all messages are as long as this rank's. With a schedule, their room depends on the step."""
        if len(gathered) != self.world * len(message):
            raise self._disagreement()

    def rows_of(self, messages: Array, world: int) -> list[int] | None:
        """Return how many rows of each message of pairs are in use, or None if a worker's gradient was not finite."""
        indices = messages[:, 0]
        used = self.ops.rows_in_use(indices, world, len(self.buffer))
        rows: list[int] = []
        for sender, number in enumerate(used):
            if number is None:
                raise self._damage(self.ops.split(indices, world)[sender], sender)
            rows.append(number)
        return None if wire.NOT_FINITE in rows else rows

    def check_indices(self, indices: Array, sender: int) -> None:
        """Raise unless the indices that a worker sent are as `wire` requires."""
        (used,) = self.ops.rows_in_use(indices, 1, len(self.buffer))
        if used is None or used == wire.NOT_FINITE:
            raise self._damage(indices, sender)

    def _damage(self, indices: Array, sender: int) -> RuntimeError:
        what = wire.flaw([int(index) for index in self.ops.numbers(indices)], len(self.buffer))
        return RuntimeError(
            f"rank {self.rank}: the message of worker {sender} for bucket {self.bucket!r} is damaged: {what}. The "
            "ranks run different models or different versions of horovod_sparse"
        )

    def check_bits(self, bits: list[float]) -> None:
        """Raise on every rank unless all ranks sent the same checksum bits. `bits` holds the sum of each bit over the ranks."""
        if any(bit not in (0.0, float(self.world)) for bit in bits):
            raise self._disagreement()

    def check_checksums(self, checksums: list[int]) -> None:
        """Raise on every rank unless all ranks sent the same checksum."""
        if len(set(checksums)) > 1:
            raise self._disagreement()

    def _disagreement(self) -> RuntimeError:
        return RuntimeError(
            f"rank {self.rank}: the ranks disagree on the state of bucket {self.bucket!r} (step, seed or threshold), so "
            "their values would not belong to the same entries. After a restart load the compression state on every "
            "rank or on none, and run the same release of NumPy and horovod_sparse everywhere"
        )


class Reduced:
    """What all ranks sent of a bucket. `write` adds it up, divided by `divisor`.

    Args:
        ops: the framework's verbs.
        sent: what the exchange returned.
        divisor: what the sum is divided by.
    """

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

    @property
    def finite(self) -> bool:
        """Whether all ranks' gradients were finite."""
        return self._sum is not None or self._messages is not None

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


Exchange = Callable[[Task], Generator[Collective, Any, Sent]]
"""A generator function that returns what all ranks sent, or None if a rank's gradient was not finite."""


def pairs(task: Task) -> Generator[Collective, Any, Sent]:
    """Exchange every rank's own entries, by one allgather of (index, value) pairs (`wire`, message 1)."""
    ops = task.ops
    if task.finite:
        selection = task.select()
        message = ops.pack(selection.indices, task.take(selection.indices), task.capacity)
        task.count = len(selection.indices)
        task.overflow = selection.found - task.count
    else:
        task.drop()
        message = ops.pack_not_finite(task.buffer, task.capacity)
    gathered = yield Collective("allgather", message)
    return _gathered_pairs(task, message, gathered)


def launched(task: Task) -> Generator[Collective, Any, Sent]:
    """Do as `pairs`, with a message that the device makes while the host goes on."""
    message = task.take_message()
    gathered = yield Collective("allgather", message)
    task.count, task.overflow = task.learn()
    return _gathered_pairs(task, message, gathered)


def _gathered_pairs(task: Task, message: Array, gathered: Array) -> Sent:
    """Return what all ranks sent, or None if a rank's gradient was not finite. `message` is what this rank sent."""
    task.check_length(gathered, message)
    used = task.rows_of(gathered, task.world)
    return None if used is None else Messages(gathered, used)


def shared_indices(task: Task) -> Generator[Collective, Any, Sent]:
    """Exchange entries that all ranks choose alike, by one allreduce of their values (`wire`, message 2)."""
    indices = task.select().indices
    return (yield from _sum(task, indices, task.take(indices), task.capacity))


def dense(task: Task) -> Generator[Collective, Any, Sent]:
    """Exchange everything, by one allreduce in the residual's own type (message 2 with all entries)."""
    return (yield from _sum(task, None, task.take_all(), len(task.buffer)))


def _sum(task: Task, indices: Array | None, values: Array, length: int) -> Generator[Collective, Any, Sent]:
    """Exchange the values at indices that all ranks know, as message 2."""
    task.count = len(values)
    tail = wire.tail(task.finite, task.checksum())
    total = yield Collective("allreduce", task.ops.pack_values(values, length, tail))
    bad, *bits = task.ops.numbers(total[length:])
    task.check_bits(bits)
    return None if bad else Entries(indices, total[: task.count])


def union(task: Task) -> Generator[Collective, Any, Sent]:
    """Exchange the union of all ranks' entries: allgather indices (message 3), then allreduce all ranks' values there."""
    ops = task.ops
    selection = task.select()
    header = [task.checksum() if task.finite else wire.NOT_FINITE, wire.float_bits(task.propose())]
    message = ops.pack_indices(selection.indices, header, task.capacity)
    gathered = yield Collective("allgather", message)
    task.check_length(gathered, message)
    messages = ops.split(gathered, task.world)
    headers = [[int(number) for number in ops.numbers(message[: wire.HEADER])] for message in messages]
    if any(checksum == wire.NOT_FINITE for checksum, _ in headers):
        task.drop()
        return None
    task.check_checksums([checksum for checksum, _ in headers])
    for sender, message in enumerate(messages):
        task.check_indices(message[wire.HEADER :], sender)
    indices = ops.union([message[wire.HEADER :] for message in messages])
    task.count = len(indices)
    task.overflow = selection.found - len(selection.indices)
    task.observe(task.count, [wire.float_of(bits) for _, bits in headers])
    room = min(task.capacity * task.world, len(task.buffer))
    total = yield Collective("allreduce", ops.pack_values(task.take(indices), room, []))
    return Entries(indices, total[: task.count])


class Round(NamedTuple):
    """What is known of one collective of an exchange before the first step."""

    kind: Literal["allgather", "allreduce"]
    dtype: str | None
    """Type of the message; None for the residual's own type."""


ROUNDS: dict[Exchange, tuple[Round, ...]] = {
    pairs: (Round("allgather", "int32"),),
    shared_indices: (Round("allreduce", "float32"),),
    dense: (Round("allreduce", None),),
    union: (Round("allgather", "int32"), Round("allreduce", "float32")),
}
"""All collectives that an exchange may ask for. If a gradient is not finite, it can end before the last one."""
