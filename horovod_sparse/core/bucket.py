"""One bucket on this rank: its memory, its adaptive state and its current step."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from horovod_sparse.compressors.base import BucketState, Compressor, Place
from horovod_sparse.compressors.momentum import scaled
from horovod_sparse.core.dense import arriving
from horovod_sparse.core.intake import Arrived, Intake
from horovod_sparse.core.layout import Layout, Slot
from horovod_sparse.core.selector import DeviceSelectorFor, HostSelector, Outcome, Selector, SlotGradient
from horovod_sparse.core.statistics import Counts, Tally
from horovod_sparse.exchange.protocols import Collective, Entries, Exchange, Exchanging, Reduced, Round, Sent
from horovod_sparse.exchange.received import rows_of
from horovod_sparse.exchange.shared import Dense
from horovod_sparse.ops.protocol import Array, Momentum, Ops, Selection

NOWHERE = -1
"""The offset that stands for no parameter, where a rank says that a gradient is not finite."""
_DENSE = Dense()
_LASTING, _FEW_STEPS = 100, 5
"""Numbers of consecutive steps with a truncated message that show a lack of room: the lower one if most had no room."""


class Bucket:
    """One bucket on this rank: the `protocols.Sender` of its exchange. `buffer` and `velocity` belong to the pipeline."""

    def __init__(
        self,
        ops: Ops,
        compressor: Compressor,
        layout: Layout,
        place: Place,
        rank: int,
        buffer: Array,
        velocity: Array | None,
        device_selector: DeviceSelectorFor,
    ) -> None:
        self.ops = ops
        self.compressor = compressor
        self.buffer, self.velocity = buffer, velocity
        correction = compressor.momentum_correction
        self._masks = correction is not None and correction.masking
        self._arrays = [buffer] if velocity is None else [buffer, velocity]
        self.layout = layout
        self.name = layout.name
        self.numel = layout.numel
        self.world = place.world
        self.position = place.position
        self.rank = rank
        self._first_sparse = compressor.first_sparse_step(place.world)
        self.slots: dict[str, Slot] = {slot.name: slot for slot in layout.slots}
        self.state: BucketState = compressor.new_state(place)
        self.tally = Tally()
        self.device = device_selector(compressor, layout, buffer, velocity)
        """What selects on the bucket's device; None if the host does. Dense steps are the host's."""
        self.exchange = compressor.exchange
        """How the bucket is exchanged in this step, or was in the last one."""
        self._before: dict[str, Any] = {}
        """The adaptive state before this step."""
        self._copies: dict[int, list[Array]] = {}
        """With a velocity: copies of residuals and velocities from before this step, by offset."""
        self._resize()
        self._host = HostSelector(ops, compressor, buffer, velocity, self._remember)
        self.close()

    def close(self) -> None:
        """Forget the step that has ended."""
        self.missing = set(self.slots)
        """Parameters whose gradient has not arrived in this step."""
        self.rates: dict[int, float] = {}
        """This step's learning rates of the parameters that have arrived, by offset; none without `lr_in_residual`."""
        self.rounds, self.bytes_sent = 0, 0.0
        """Collectives begun in this step, and the bytes that they have sent."""
        self.outcome = Outcome()
        self.sent_by_all: Sent = None
        """What all ranks have sent, once the exchange has ended; None if a gradient was not finite."""
        self._added: list[tuple[Slot, Array, float]] = []
        """The gradients that the residual has taken in, and their rates: a step that fails takes them out again."""
        self._taken: list[Entries] = []
        """Entries of the residual taken, and their values before."""
        self._all_taken = False
        """Whether everything is sent. The residual still holds it then."""
        self._message: Array | None = None
        """The message that a device makes with what it takes. Its number of entries may not be known yet."""
        self.run: Exchanging | None = None
        """The exchange of this step; None until it begins."""

    # --- gradients in ---

    def begin_step(self) -> None:
        """Begin a step, when its first gradient arrives."""
        self._before = self.state.snapshot()
        self._in_dense_steps = self.is_dense
        self._resize()
        self.exchange = _DENSE if self._in_dense_steps else self.compressor.exchange
        self.selector: Selector = self._host if self.device is None or self._in_dense_steps else self.device
        self.selector.begin(self.state, self.k, self.capacity, selects=not self._in_dense_steps)

    def take_in(self, arrived: Sequence[Arrived], rates: Sequence[float], intake: Intake) -> None:
        """Add gradients to the residual, each in units of its rate. Raise RuntimeError if one has arrived before.

        Their memory must stay as it is until the step has ended.
        """
        gradients: dict[float, list[SlotGradient]] = defaultdict(list)
        untouched: list[SlotGradient] = []
        for (name, gradient, _), rate in zip(arrived, rates, strict=True):
            arriving(self.missing, name)
            slot = self.slots[name]
            if intake.in_updates:
                # Also without a gradient: what others send is in the unit of this rate.
                self.rates[slot.offset] = rate
            if gradient is None:
                untouched.append((slot, None))
                continue
            self._added.append((slot, gradient, rate))
            if intake.momentum is not None:
                self._remember_slot(slot)
            if rate == 0.0:
                # The learning rate is 0, so that the update is 0, whatever the velocity is.
                if intake.momentum is not None:
                    self._accelerate(slot, gradient, intake.momentum, intake)
                untouched.append((slot, None))
                continue
            gradients[rate].append((slot, intake.prepared(gradient, self.layout.residual_dtype)))
        for rate, some in gradients.items():
            self.selector.accumulate(some, intake.momentum, rate)
        if untouched:
            # What a device has noted of them is of the step before.
            self.selector.accumulate(untouched, None, 1.0)

    def _accelerate(self, slot: Slot, gradient: Array, momentum: Momentum, intake: Intake) -> None:
        """Add a gradient to the velocity alone, unless it holds NaN or infinity."""
        assert self.velocity is not None
        velocity = self.velocity[slot.offset : slot.offset + slot.numel]
        velocity *= momentum.factor
        if self.ops.all_finite(gradient):
            dtype = self.layout.residual_dtype
            # Rounded to the residual's type first, as it is with any other rate.
            velocity += scaled(self.ops, intake.prepared(gradient, dtype), 1.0, dtype).reshape(-1)

    def spoil(self) -> None:
        """Let this rank's message say that its gradient is not finite, because it gives the step up. Call it before `begin`."""
        self.missing.clear()
        self.selector = self._host
        self._host.begin(self.state, self.k, self.capacity, selects=False)
        self._host.not_finite.append(NOWHERE)

    def _remember_slot(self, slot: Slot) -> None:
        """Copy a parameter's residual and velocity, to the memory of the copies of the step before."""
        part = slice(slot.offset, slot.offset + slot.numel)
        now = [array[part] for array in self._arrays]
        if slot.offset not in self._copies:
            self._copies[slot.offset] = [self.ops.copy(array) for array in now]
        else:
            for memory, array in zip(self._copies[slot.offset], now, strict=True):
                self.ops.assign(memory, array)

    @property
    def is_dense(self) -> bool:
        """Whether everything is sent in the next step, or in the one that has begun."""
        return self.state.step < self._first_sparse

    def _resize(self) -> None:
        """Set k and the capacity of this step."""
        self.k = self.compressor.target_count(self.numel, self.compressor.ratio_at(self.state.step))
        self.capacity = self.compressor.message_capacity(self.numel, self.k, self.world)

    def rounds_of(self, exchange: Exchange) -> Sequence[Round]:
        """Return the collectives of an exchange of this bucket."""
        return exchange.rounds(self.numel, self.k, self.capacity, self.world)

    def forget(self) -> None:
        """Forget what was seen of the buffer, because it no longer applies."""
        self._host.forget()
        if self.device is not None:
            self.device.forget()

    def begin(self) -> Collective:
        """Select from a complete bucket; return its exchange's first collective. What is not selected stays in the residual."""
        # Not earlier: on other ranks the parameters may have arrived in another order.
        self.state.know_rate(max(self.rates.values(), default=1.0))
        self.target = self.numel if self._in_dense_steps else self.k
        self.run = self.exchange.collectives(self)
        return self._counted(next(self.run))

    # --- as the exchange sees it: `protocols.Sender` ---

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def finite(self) -> bool:
        return not self._host.not_finite

    def message(self) -> Array:
        message = self.selector.message()
        if self.selector is self.device:
            self._message = message
        return message

    def finish(self) -> None:
        self.outcome = self.selector.finish()

    def select(self) -> Selection:
        return self._host.select(self.buffer, self.state, self.k, self.capacity)

    def _remember(self, indices: Array) -> Array:
        entries = self.ops.zeros(len(indices), self.layout.residual_dtype, self.buffer)
        self._taken.append(Entries(indices, entries))
        return entries

    def take(self, indices: Array) -> Array:
        values = self.ops.take(self.buffer, indices, self._remember(indices))
        self.drop_rest()
        return values

    def take_all(self) -> Array:
        self._all_taken = True
        return self.buffer

    def drop_rest(self) -> None:
        """Zero the buffer if `residual` is False. Then nothing is kept, not even from a step that fails."""
        if not self.compressor.residual:
            self.buffer[:] = 0

    def sent(self, count: int, truncated: int = 0) -> None:
        self.outcome = Outcome(count, truncated)

    def checksum(self) -> int:
        return self.state.checksum() ^ self.state.fingerprint

    def observe(self, count: int, proposed: list[float]) -> None:
        self.compressor.observe(self.state, count, self.k, proposed)

    # --- results ---

    def advance(self, result: Array) -> Collective:
        """Continue the exchange with the result of its last collective. Raises StopIteration with what all ranks sent."""
        assert self.run is not None
        return self._counted(self.run.send(result))

    def _counted(self, collective: Collective) -> Collective:
        self.rounds += 1
        self.bytes_sent += collective.bytes_sent(self.world)
        return collective

    def receive(self, sent: Sent) -> bool:
        """End the exchange with what all ranks have sent. Return whether all gradients were finite."""
        self.sent_by_all = sent
        return sent is not None

    def bad(self) -> list[str]:
        """Return the parameters whose gradients were not finite on this rank."""
        offsets: Sequence[int] = self._host.not_finite if self.selector is self._host else self.outcome.not_finite
        return [slot.name for slot in self.layout.slots if slot.offset in offsets] if offsets else []

    def reduced(self, divisor: float) -> Reduced:
        """Return the reduced gradients; NaN if a gradient was not finite."""
        return Reduced(self.ops, self.sent_by_all, divisor, self.rates)

    def commit(self, divisor: float, intake: Intake) -> None:
        """End a step that has succeeded on all ranks: what was taken has been sent, and the rest stays."""
        if self._all_taken:
            self.buffer[:] = 0
        if self.velocity is not None and self._masks and not self._in_dense_steps:
            self._recall()
            taken = [slice(None)] if self._all_taken else [entries.indices for entries in self._taken]
            for indices in taken:
                self.velocity[indices] = 0
        state, (count, truncated, _) = self.state, self.outcome
        self.tally = self.tally.with_step(
            Counts(self.target, count, state.threshold, state.stages, truncated, self.bytes_sent)
        )
        state.step += 1

    def undo(self, intake: Intake) -> None:
        """Let the step never have been. Without a velocity, gradients are taken out of the residual, to rounding."""
        self._recall()
        for indices, values in self._taken:
            # Zeros are those of entries that are not taken yet, or that were zero.
            if bool(values.any()):
                self.buffer[indices] = values
        self.drop_rest()
        self.forget()
        self.state.restore(self._before)
        for slot, gradient, rate in self._added if self.compressor.residual else ():
            part = slice(slot.offset, slot.offset + slot.numel)
            if self.velocity is not None:
                for array, copied in zip(self._arrays, self._copies[slot.offset], strict=True):
                    self.ops.assign(array[part], copied)
            elif rate != 0.0:
                prepared = intake.prepared(gradient, self.layout.residual_dtype)
                self.ops.accumulate(self.buffer, [(slot.offset, prepared)], None, -rate)

    def warn_truncated(self) -> bool:
        """Warn and return True if messages have lacked room for long, or for some steps for most of the entries."""
        last = self.tally.last
        if self.tally.truncated_steps < (_FEW_STEPS if last.truncated > last.sent else _LASTING):
            return False
        warnings.warn(
            f"horovod_sparse: rank {self.rank}: for {self.tally.truncated_steps} steps more entries of bucket {self.name!r} "
            f"qualified than its message has room for (in the last step {last.sent + last.truncated:.0f}, room for "
            f"{last.sent:.0f}); the rest waits in the residual. "
            f"Raise slack (now {self.compressor.slack:g}) or ratio or, with Threshold, the threshold",
            stacklevel=2,
        )
        return True

    def _recall(self) -> None:
        """Find out what a device has taken. What is left of it in the residual, and what was sent, are what it was before."""
        rows = None if self._message is None else rows_of(self, self._message, 1)
        if rows is not None:
            indices, values = self.ops.unpack(self._message, rows[0])
            self._taken, self._message = [Entries(indices, self.buffer[indices] + values)], None

    def reset(self) -> None:
        """Forget adaptive state and statistics; the residual has been set to zero."""
        self.forget()
        self.state = self.compressor.new_state(self.state.place)
        self.tally = Tally()
