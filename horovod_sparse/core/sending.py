"""One bucket in one step, from gradients to reduced gradients. Imports no framework. Tested by tests/core/test_machine.py."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from horovod_sparse.compressors.momentum import scaled
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.intake import Intake
from horovod_sparse.core.layout import Slot
from horovod_sparse.core.selector import Outcome, Selector
from horovod_sparse.core.statistics import Counts
from horovod_sparse.exchange import wire
from horovod_sparse.exchange.protocols import Asked, Collective, Entries, Exchanging, Messages, Sent, Told
from horovod_sparse.exchange.received import disagreement
from horovod_sparse.ops.protocol import Array, Hints, Moving, Part, Selection

NOWHERE = -1
"""The offset that stands for no parameter, where a rank says that a gradient is not finite."""
_NO_HINTS = Hints()


class Sending:
    """A bucket in one step: the `protocols.Sender` of its exchange. The host selects, on arrays that may be on any device.

    Args:
        bucket: what is kept of it from step to step.
        intake: how gradients are taken in in this step.
    """

    together: ClassVar[float] = 2**18
    """Bytes of gradients that are added together; a processor's cache holds as many."""

    def __init__(self, bucket: Bucket, intake: Intake) -> None:
        self.bucket, self.layout, self.name, self.rank = bucket, bucket.layout, bucket.name, bucket.rank
        self.ops, self.buffer, self.state, self.numel = bucket.ops, bucket.buffer, bucket.state, bucket.numel
        self.world, self.position = bucket.world, bucket.position
        self.stage = stage = bucket.stage
        self.capacity = stage.capacity
        self._momentum, self._prepare = intake.momentum, intake.prepare
        self._before = bucket.state.copied()
        """The adaptive state before this step."""
        bucket.tracked.begin(_NO_HINTS if stage.is_dense else bucket.compressor.hints(bucket.state, bucket.few))
        self.missing = len(bucket.slots)
        """How many gradients have not arrived yet."""
        self._arrived: list[tuple[Slot, Array | None, float]] = []
        """Gradients that wait to be added together: large ones are added at once, while they are in the caches."""
        self._nbytes = 0
        self._added: list[tuple[Slot, Array, float]] = []
        """The gradients that the residual has, and their rates: a step that fails takes them out again."""
        self.rates: dict[int, float] = {}
        """This step's learning rates of the parameters that have arrived, by offset; none without `lr_in_residual`."""
        self.not_finite: list[int] = []
        """The offsets of this rank's parameters whose gradients are known not to be finite."""
        self._message: Array | None = None
        """A message of pairs with what was taken out of the residual. On a device its number may not be known yet."""
        self._taken: list[Entries] = []
        """Entries taken out of the residual in another way."""
        self._all_taken = False
        """Whether everything is sent. The residual still holds it then."""
        self.outcome = Outcome()
        self.rounds = 0
        """Collectives begun in this step."""
        self._collective: Collective | None = None
        """The last of them."""
        self._run: Exchanging | None = None
        """The exchange; None until it begins."""
        self.sent_by_all: Sent = None
        """What all ranks have sent, once the exchange has ended; None if a gradient was not finite."""
        self.fails = False
        """Whether the exchange has ended, and a gradient was not finite on some rank."""

    # --- gradients in ---

    def add(self, name: str, gradient: Array | None, rate: float | None) -> None:
        """Add a gradient to the residual, in units of its rate. Its memory must stay as it is until the step has ended."""
        self.missing -= 1
        slot = self.bucket.slots[name]
        if rate is not None:
            # Also without a gradient: what others send is in the unit of this rate.
            self.rates[slot.offset] = rate
        self._arrived.append((slot, gradient, 1.0 if rate is None else rate))
        self._nbytes += 0 if gradient is None else gradient.nbytes
        if self._nbytes >= self.together or not self.missing:
            self._add_together()

    def _add_together(self) -> None:
        together: dict[float, list[Part]] = defaultdict(list)
        untouched: list[Part] = []
        for slot, gradient, rate in self._arrived:
            if gradient is None:
                untouched.append((slot.offset, None))
                continue
            self._added.append((slot, gradient, rate))
            if self._momentum is not None:
                self.bucket.copy(slot)
            if self._prepare is not None:
                gradient = self._prepare(gradient, self.layout.residual_dtype)
            if rate == 0.0:
                # The learning rate is 0, so that the update is 0, whatever the velocity is.
                self._accelerate(slot, gradient)
                untouched.append((slot.offset, None))
                continue
            together[rate].append((slot.offset, gradient))
        self._arrived, self._nbytes = [], 0
        for rate, parts in together.items():
            self._accumulate(parts, rate)
        if untouched:
            self._leave(untouched)

    def _accumulate(self, parts: list[Part], rate: float) -> None:
        """Add gradients to the residual, through the velocity if there is a momentum."""
        momentum, velocity = self._momentum, self.bucket.velocity
        moving = None if momentum is None or velocity is None else Moving(velocity, momentum)
        # Entries are noted in this order, which should be that of the buffer.
        parts.sort(key=operator.itemgetter(0))
        bad = self.bucket.tracked.add(parts, moving, rate)
        if any(bad):
            self.not_finite += [offset for (offset, _), number in zip(parts, bad, strict=True) if number]

    def _leave(self, parts: list[Part]) -> None:
        """Leave the residual of some parameters as it is."""

    def _accelerate(self, slot: Slot, gradient: Array) -> None:
        """Add a gradient to the velocity alone, if there is one, unless it holds NaN or infinity."""
        if self._momentum is None or self.bucket.velocity is None:
            return
        velocity = self.bucket.velocity[slot.offset : slot.offset + slot.numel]
        velocity *= self._momentum
        if self.ops.all_finite(gradient):
            # Rounded to the residual's type first, as it is with any other rate.
            velocity += scaled(self.ops, gradient, 1.0, self.layout.residual_dtype).reshape(-1)

    def spoil(self) -> None:
        """Let this rank's message say that its gradient is not finite, because it gives the step up. Call it before `begin`."""
        self.not_finite.append(NOWHERE)

    def begin(self) -> Collective:
        """Select from a complete bucket; return its exchange's first collective. What is not selected stays in the residual."""
        self._run = self.stage.exchange.collectives(self)
        self.rounds = 1
        first = next(self._run)
        assert isinstance(first, Collective)
        self._collective = first
        return first

    # --- as the exchange sees it: `protocols.Sender` ---

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def finite(self) -> bool:
        return not self.not_finite

    def message(self) -> Array:
        indices = self.ops.indices(np.empty(0, np.int64), self.buffer) if self.not_finite else self.select().indices
        message = self._message = self.ops.take_pairs_out(self.buffer, indices, self.capacity)
        if self.not_finite:
            message[0, 0] = wire.NOT_FINITE
        return message

    def select(self) -> Selection:
        tracked = self.bucket.tracked
        selection = self.bucket.select(tracked, self.buffer, self.stage.k, self.capacity, self.state)
        tracked.forget()
        self.outcome = Outcome(len(selection.indices), selection.found - len(selection.indices))
        return selection

    def index_message(self) -> Array:
        indices = self.select().indices
        checksum = self.checksum() if self.finite else wire.NOT_FINITE
        return self.ops.pack_indices(indices, [checksum, wire.float_bits(self.state.proposal)], self.capacity)

    def union(self, gathered: Array) -> tuple[Array, Array]:
        indices = self.ops.union(gathered, self.world, wire.HEADER, self.numel)
        number = wire.DAMAGED if indices is None else len(indices)
        (headers,) = self.ops.told([gathered.reshape(self.world, -1)[:, : wire.HEADER].reshape(-1)])
        numbers = self.ops.indices(np.array([number, *headers]), self.buffer)
        return self.ops.indices(np.empty(0, np.int64), self.buffer) if indices is None else indices, numbers

    def value_message(self, indices: Array | None, length: int, checksum: int | None) -> Array:
        tail = [] if checksum is None else wire.tail(checksum, is_bad=not self.finite)
        if indices is None:
            self._all_taken, values = True, self.buffer
        else:
            values = self.ops.take_out(self.buffer, indices)
            self._taken.append(Entries(indices, values))
        return self.ops.pack_values(values, length, tail)

    def checksum(self) -> int:
        return self.state.checksum() ^ self.state.fingerprint

    def observe(self, count: int, proposed: list[float]) -> None:
        self.bucket.compressor.observe(self.state, count, self.stage.k, proposed)

    # --- results ---

    def receive(self, result: Array) -> Asked | None:
        """Continue the exchange with the result of its collective: see `advance`.

        Raises:
            RuntimeError: it is not what messages like this rank's give. With a schedule, that depends on the step.
        """
        asked = self._collective
        assert asked is not None
        message, copies = asked.message, self.world if asked.kind == "allgather" else 1
        if result.shape != (copies * message.shape[0], *message.shape[1:]) or result.dtype != message.dtype:
            raise disagreement(self)
        return self.advance(result)

    def advance(self, answer: Any) -> Asked | None:
        """Continue the exchange with what it has asked for. Return what it asks for next, or None at the end."""
        assert self._run is not None
        try:
            asked = self._run.send(answer)
        except StopIteration as end:
            sent: Sent = end.value
            self.sent_by_all, self.fails = sent, sent is None
            if sent is not None:
                count = sent.used[self.position] if isinstance(sent, Messages) else len(sent.values)
                self.outcome = self.outcome._replace(sent=count)
            return None
        if isinstance(asked, Collective):
            self.rounds += 1
            self._collective = asked
        return asked

    def bad(self) -> list[str]:
        """Return the parameters whose gradients were not finite on this rank."""
        return [slot.name for slot in self.layout.slots if slot.offset in self.not_finite] if self.not_finite else []

    def commit(self) -> None:
        """End a step that has succeeded on all ranks: what was taken out has been sent, and the rest stays."""
        bucket, stage, state = self.bucket, self.stage, self.state
        if self._all_taken or not bucket.compressor.residual:
            self.buffer[:] = 0
        if bucket.velocity is not None and bucket.masks and not stage.is_dense:
            taken = [] if self._all_taken else self._taken_out(self.outcome.sent)
            for indices in [slice(None)] if self._all_taken else [entries.indices for entries in taken]:
                bucket.velocity[indices] = 0
        count, truncated, _ = self.outcome
        counts = Counts(stage.k, count, state.threshold, state.stages, truncated, stage.bytes_sent)
        bucket.steps += 1
        bucket.last, bucket.sums = counts, Counts(*map(operator.add, bucket.sums, counts))
        bucket.truncated_steps = bucket.truncated_steps + 1 if truncated else 0
        bucket.exchange = stage.exchange
        state.step += 1
        if state.step not in stage.steps:
            bucket.go_on(state)

    def undo(self) -> None:
        """Let the step never have been. Without a velocity, gradients are taken out of the residual, to rounding."""
        bucket = self.bucket
        used = 0
        if self._message is not None:
            ((rows,),) = self.ops.told([self.ops.rows_in_use(self._message, 1, self.numel)])
            # If a gradient was not finite, the message is empty.
            used = max(rows, 0)
        for indices, values in self._taken_out(used):
            self.buffer[indices] += values
        bucket.forget()
        bucket.state = self._before
        if not bucket.compressor.residual:
            # Nothing is kept, not even from a step that fails.
            self.buffer[:] = 0
            return
        for slot, gradient, rate in self._added:
            if bucket.velocity is not None:
                bucket.put_back(slot)
            elif rate != 0.0:
                prepared = gradient if self._prepare is None else self._prepare(gradient, self.layout.residual_dtype)
                self.ops.accumulate(self.buffer, [(slot.offset, prepared)], None, -rate)

    def _taken_out(self, used: int) -> list[Entries]:
        """Return what was taken out of the residual, of which so many entries are in the message."""
        return self._taken if self._message is None else [*self._taken, Entries(*self.ops.unpack(self._message, used))]


class DeviceSending(Sending):
    """A bucket that selects on its device in a step.

    Args:
        device: what selects. The other arguments are those of `Sending`.
    """

    together: ClassVar[float] = math.inf
    """All of a bucket are added by one launch."""

    def __init__(self, bucket: Bucket, intake: Intake, device: Selector) -> None:
        super().__init__(bucket, intake)
        self._device = device
        self._has_asked = False
        """Whether the device's numbers are part of what the exchange has asked for."""
        device.begin(self.state, self.stage)

    def _accumulate(self, parts: Sequence[Part], rate: float) -> None:
        self._device.accumulate(parts, self._momentum, rate)

    def _leave(self, parts: Sequence[Part]) -> None:
        # What the device has noted of them is of the step before.
        self._device.accumulate(parts, None, 1.0)

    def begin(self) -> Collective:
        self._device.decide(gives_up=not self.finite)
        return super().begin()

    def message(self) -> Array:
        message = self._message = self._device.message()
        return message

    def select(self) -> Selection:
        return self._device.select()

    def index_message(self) -> Array:
        return self._device.index_message(self.checksum())

    def union(self, gathered: Array) -> tuple[Array, Array]:
        return self._device.union(gathered, self.world)

    def value_message(self, indices: Array | None, length: int, checksum: int | None) -> Array:
        if indices is None:
            self._all_taken = True
            return self._device.whole(checksum)
        self._message, message = self._device.take_out(indices, length, checksum)
        return message

    def advance(self, answer: Any) -> Asked | None:
        if self._has_asked:
            *answer, numbers = answer
            self.outcome = self._device.finish(numbers)
            self.not_finite += self.outcome.not_finite
        asked = super().advance(answer)
        # What the device knows of its selection is learned with what the exchange asks for.
        self._has_asked = False
        if isinstance(asked, Told) and not self.not_finite:
            self._has_asked = True
            asked = Told([*asked.arrays, self._device.numbers])
        return asked
