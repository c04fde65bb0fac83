"""How the ranks' selections become one reduced gradient. Imports no framework.

An exchange is a generator: it yields the collectives that it needs, one after the other, and is sent their results. The
adapter decides when to start a collective and when to wait. It can advance all buckets before it waits for the first again.

Every rank gets the same result to the last bit: gathered values are added rank by rank, and an allreduce gives all ranks
the same sums. A rank whose gradient is not finite still takes part and says so; then all ranks return None. What was taken
out of the residual counts as sent only when the whole step has succeeded. Otherwise it returns to the residual.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from horovod_sparse.exchange import wire
from horovod_sparse.exchange.grid import Grid
from horovod_sparse.ops.protocol import Array, Ops, Part, Selection, Values

_OUT_OF_ORDER = "its indices do not ascend within the bucket, with padding after them"


Kind = Literal["allgather", "allreduce", "alltoall"]


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
    k: int
    """How many entries are wanted."""
    world: int
    rank: int
    position: int
    """Index of this rank among those that exchange."""

    @property
    def step(self) -> int:
        """The number of this step, which must be the same on all ranks."""

    @property
    def finite(self) -> bool:
        """Whether all of this rank's gradients are finite."""

    @property
    def values(self) -> Values:
        """The type of the values in messages of pairs. If it has 16 bits, they are compact (`wire`, message 4)."""

    def message(self) -> Array:
        """Select, and return the message of pairs with what was selected."""

    def finish(self) -> None:
        """Wait for the selection that `message` has begun, and learn from it."""

    def select(self) -> Selection:
        """Return the selection. Nothing is taken."""

    @property
    def grid(self) -> Grid:
        """The hosts and slots of the ranks."""

    def message_of_shard(self, received: Array | None) -> Array:
        """Add up what was received of this rank's shard, select from the sum, and return message 8 for one host.

        If nothing of use was received, that is None. The message then says that a gradient is not finite.
        """

    def host_sent(self, indices: Sequence[Array]) -> None:
        """Record what the ranks of this host have sent."""

    @property
    def bounds(self) -> list[int]:
        """The bounds of the ranks' regions (`regions`)."""

    def message_to_regions(self, room: int) -> Array:
        """Select from the other ranks' regions, and return message 5 with up to `room` entries for each of them."""

    def region(self) -> Array:
        """Return a copy of this rank's region as it was before `message_to_regions`."""

    def forward(self, region: Array, most: int) -> Array:
        """Take the largest `most` entries out of the region, and return message 6 with them.

        The region belongs to this object from now on. It becomes the residual when the step succeeds.
        """

    def balance(self, counts: list[int]) -> None:
        """Move the bounds of the regions, which have received so many entries."""

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

    def observe(self, indices: Array, proposed: list[float]) -> None:
        """Take in the entries that all ranks send together, and what each rank has proposed."""


Exchange = Callable[[Sender], Generator[Collective, Any, Sent]]
"""A generator function that returns what all ranks sent, or None if a rank's gradient was not finite."""


def sparse_allgather(bucket: Sender) -> Generator[Collective, Any, Sent]:
    """Exchange every rank's own entries, by one allgather of (index, value) pairs (`wire`, message 1 or 4)."""
    message = bucket.message()
    gathered = yield Collective("allgather", message)
    # A device may have made the message while the host went on.
    bucket.finish()
    check_result(bucket, gathered, (bucket.world * len(message), *message.shape[1:]), message.dtype)
    if bucket.values != "float32":
        gathered = bucket.ops.expand(gathered, bucket.world, bucket.numel, bucket.values)
    used = rows_of(bucket, gathered, bucket.world)
    return None if used is None else Messages(gathered, used)


def shared_indices(bucket: Sender) -> Generator[Collective, Any, Sent]:
    """Exchange entries that all ranks choose alike, by one allreduce of their values (`wire`, message 2)."""
    indices = bucket.select().indices
    return (yield from summed(bucket, indices, bucket.take(indices), bucket.capacity, bucket.checksum()))


def dense(bucket: Sender) -> Generator[Collective, Any, Sent]:
    """Exchange everything, by one allreduce in the residual's own type (message 2 with all entries)."""
    return (yield from summed(bucket, None, bucket.take_all(), bucket.numel, bucket.checksum()))


def summed(
    bucket: Sender, indices: Array | None, values: Array, length: int, checksum: int
) -> Generator[Collective, Any, Sent]:
    """Exchange the values at indices that all ranks know (None: all entries), as message 2.

    Args:
        bucket: the bucket, out of whose residual `values` were taken.
        indices: ascending and unique.
        values: one for each index, at most `length`.
        length: number of values in the message, the same on all ranks.
        checksum: a number >= 0. If its lowest 16 bits differ between the ranks, all raise RuntimeError.
    """
    bucket.sent(len(values))
    tail = wire.tail(bucket.finite, checksum)
    total = yield Collective("allreduce", bucket.ops.pack_values(values, length, tail))
    check_result(bucket, total, (length + len(tail),), values.dtype)
    bad, *bits = total[length:].tolist()
    # `bits` holds the sum of each bit of the checksum over the ranks.
    if any(bit not in (0.0, float(bucket.world)) for bit in bits):
        raise disagreement(bucket)
    if not 0 <= bad <= bucket.world or bad % 1:
        raise damaged(
            bucket, "sum of the messages", f"{bad} of {bucket.world} workers say that their gradients are not finite"
        )
    return None if bad else Entries(indices, total[: len(values)])


def union(bucket: Sender) -> Generator[Collective, Any, Sent]:
    """Exchange the union of all ranks' entries: allgather indices (message 3), then allreduce all ranks' values there."""
    ops = bucket.ops
    selection = bucket.select()
    header = [bucket.checksum() if bucket.finite else wire.NOT_FINITE, wire.float_bits(bucket.proposal())]
    message = ops.pack_indices(selection.indices, header, bucket.capacity)
    gathered = yield Collective("allgather", message)
    check_result(bucket, gathered, (bucket.world * (wire.HEADER + bucket.capacity),), message.dtype)
    headers = [_header(row) for row in gathered.reshape(bucket.world, -1)[:, : wire.HEADER].tolist()]
    if any(checksum == wire.NOT_FINITE for checksum, _ in headers):
        bucket.drop_rest()
        return None
    _check_headers(bucket, headers)
    indices = ops.union(gathered, bucket.world, wire.HEADER, bucket.numel)
    if indices is None:
        raise damaged(bucket, "message of a worker", _OUT_OF_ORDER)
    bucket.sent(len(indices), selection.found - len(selection.indices))
    bucket.observe(indices, [proposed for _, proposed in headers])
    room = min(bucket.capacity * bucket.world, bucket.numel)
    values = bucket.take(indices)
    total = yield Collective("allreduce", ops.pack_values(values, room, []))
    check_result(bucket, total, (room,), values.dtype)
    return Entries(indices, total[: len(indices)])


# --- checks of what was received: errors are raised on every rank ---


def rows_of(bucket: Sender, messages: Array, world: int) -> list[int] | None:
    """Return how many rows of each message of pairs are in use, or None if a worker's gradient was not finite."""
    rows: list[int] = []
    for sender, number in enumerate(bucket.ops.rows_in_use(messages, world, bucket.numel)):
        if number is None:
            raise damaged(bucket, f"message of worker {sender}", _OUT_OF_ORDER)
        rows.append(number)
    return None if wire.NOT_FINITE in rows else rows


def check_result(bucket: Sender, result: Array, shape: tuple[int, ...], dtype: object) -> None:
    """Raise unless a collective's result is what messages like this rank's give. With a schedule, that depends on the step."""
    if result.shape != shape or result.dtype != dtype:
        raise disagreement(bucket)


def _header(numbers: Sequence[float]) -> tuple[int, float]:
    """Return the checksum and the proposed number in the header of a message of indices."""
    checksum, bits = numbers
    return int(checksum), wire.float_of(int(bits))


def _check_headers(bucket: Sender, headers: Sequence[tuple[int, float]]) -> None:
    """Raise unless all ranks have sent the same checksum, and each has proposed a finite number."""
    for sender, (checksum, proposed) in enumerate(headers):
        if checksum < 0 or not math.isfinite(proposed):
            raise damaged(bucket, f"message of worker {sender}", f"its header holds {checksum} and {proposed}")
    if len({checksum for checksum, _ in headers}) > 1:
        raise disagreement(bucket)


def damaged(bucket: Sender, which: str, what: str) -> RuntimeError:
    """Return the error for a message that is not as `wire` requires."""
    return RuntimeError(
        f"rank {bucket.rank}: the {which} for bucket {bucket.name!r} is damaged: {what}. The "
        "ranks run different models or different versions of horovod_sparse"
    )


def disagreement(bucket: Sender) -> RuntimeError:
    """Return the error for ranks whose steps, adaptive numbers or random choices differ."""
    return RuntimeError(
        f"rank {bucket.rank}: the ranks disagree on the state of bucket {bucket.name!r} (step, seed, threshold or regions), so "
        "their values would not belong to the same entries. After a restart load the compression state on every "
        "rank or on none, and run the same release of NumPy and horovod_sparse everywhere"
    )


class Reduced:
    """What all ranks sent of a bucket. `write` adds it up, divided by `divisor`.

    `rates` are numbers, by the offsets of parameters, by which their parts are divided too. Where that is 0, zero is written.
    """

    def __init__(self, ops: Ops, sent: Sent, divisor: float, rates: Mapping[int, float]) -> None:
        self._ops = ops
        self._divisor, self._rates = divisor, rates
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

    def parts(self) -> list[Entries]:
        """Return what is added up, part by part and not divided. It is made on each call."""
        if self._messages is None:
            return [] if self._sum is None else [Entries(None, self._sum)]
        gathered, used = self._messages
        pairs = zip(wire.split(gathered, len(used)), used, strict=True)
        return [Entries(*self._ops.unpack(message, rows)) for message, rows in pairs]

    def divisor_at(self, first: int) -> float:
        """Return the number by which the part that begins at an index is divided."""
        return self._divisor * (self._rates.get(first, 1.0) or math.inf)

    def write(self, parts: Sequence[Part]) -> None:
        """Write the sum, in rank order, to the parameters' parts (flat arrays); NaN if a rank's gradient was not finite."""
        together = defaultdict[float, list[Part]](list)
        for part in parts:
            together[self.divisor_at(part[0])].append(part)
        for divisor, some in together.items():
            self._write(some, divisor)

    def _write(self, parts: Sequence[Part], divisor: float) -> None:
        if self._messages is not None:
            self._ops.assembler(*self._messages, divisor)(parts)
            return
        for first, target in parts:
            if self._sum is None:
                target[:] = math.nan
            else:
                self._ops.assign(target, self._sum[first : first + len(target)])
                if divisor != 1.0:
                    target /= divisor
