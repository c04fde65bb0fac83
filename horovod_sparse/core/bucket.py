"""One bucket on this rank: its memory, its adaptive state and its current step."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence

from horovod_sparse.compressors.base import BucketState, Compressor, Place
from horovod_sparse.compressors.momentum import scaled
from horovod_sparse.core.dense import arriving
from horovod_sparse.core.intake import Arrived, Intake
from horovod_sparse.core.layout import Layout, Slot
from horovod_sparse.core.selector import DeviceSelectorFor, HostSelector, Outcome, Selector, SlotGradient
from horovod_sparse.core.statistics import Counts, Tally
from horovod_sparse.core.step import Before, Ending
from horovod_sparse.exchange.protocols import Collective, Entries, Exchange, Exchanging, Kind, Reduced, Round, Sent
from horovod_sparse.exchange.received import rows_of
from horovod_sparse.exchange.shared import Dense
from horovod_sparse.ops.protocol import Array, Momentum, Ops, Selection

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
        self.begins_dense = self._first_sparse > 0
        """Whether everything is sent in the first steps."""
        self.slots: dict[str, Slot] = {slot.name: slot for slot in layout.slots}
        self.state: BucketState = compressor.new_state(place)
        self.tally = Tally()
        self.device = device_selector(compressor, layout, buffer, velocity)
        """What selects on the bucket's device; None if the host does. Dense steps are the host's."""
        self.exchange = compressor.exchange
        """How the bucket is exchanged in this step, or was in the last one."""
        self._copies: list[Array] | None = None
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
        self.counts: Counts | None = None
        """Counts of this step, until it succeeds."""
        self._taken: list[Entries] = []
        """Entries of the residual taken, and their values before; zeros until they are taken."""
        self._all_taken = False
        """Whether everything is sent. The residual still holds it then."""
        self._message: Array | None = None
        """The message that a device makes with what it takes. Its number of entries may not be known yet."""
        # Last: until here an ending that was interrupted can be done again.
        self.run: Exchanging | None = None
        """The exchange of this step; None until it begins."""

    # --- gradients in ---

    def begin_step(self, *, copies: bool) -> Before:
        """Begin a step, when its first gradient arrives. Return what is needed to undo it."""
        before = Before(self.state.snapshot(), self.tally, self._copy() if copies else ())
        self._in_dense_steps = self.is_dense
        self._resize()
        self.exchange = _DENSE if self._in_dense_steps else self.compressor.exchange
        self.stands_in: Kind | None = None
        """What ranks in other steps would begin with, if that is another collective."""
        if self._in_dense_steps:
            mine, usual = (self.rounds_of(one)[0].kind for one in (self.exchange, self.compressor.exchange))
            self.stands_in = usual if usual != mine else None
        self.selector: Selector = self._host if self.device is None or self._in_dense_steps else self.device
        self.selector.begin(self.state, self.k, self.capacity, selects=not self._in_dense_steps)
        return before

    def take_in(self, arrived: Sequence[Arrived], rates: Sequence[float], intake: Intake) -> None:
        """Add gradients to the residual, each in units of its rate. Raise RuntimeError if one has arrived before."""
        gradients: dict[tuple[Momentum | None, float], list[SlotGradient]] = defaultdict(list)
        for (name, gradient, _), rate in zip(arrived, rates, strict=True):
            arriving(self.missing, name)
            slot, momentum = self.slots[name], intake.momentum(name)
            if intake.in_updates:
                self.rates[slot.offset] = rate
            if rate == 0.0:
                # The learning rate is 0, so that the update is 0, whatever the velocity is.
                if momentum is not None:
                    self._accelerate(slot, gradient, momentum, intake)
                gradient = momentum = None
            if gradient is not None:
                gradient = intake.prepared(gradient, self.layout.residual_dtype)
            gradients[momentum, rate].append((slot, gradient))
        for (momentum, rate), some in gradients.items():
            self.selector.accumulate(some, momentum, rate)

    def _accelerate(self, slot: Slot, gradient: Array | None, momentum: Momentum, intake: Intake) -> None:
        """Add a gradient to the velocity alone, unless it holds NaN or infinity."""
        assert self.velocity is not None
        velocity = self.velocity[slot.offset : slot.offset + slot.numel]
        velocity *= momentum.factor
        if gradient is not None and self.ops.all_finite(gradient):
            dtype = self.layout.residual_dtype
            # Rounded to the residual's type first, as it is with any other rate.
            velocity += scaled(self.ops, intake.prepared(gradient, dtype), 1.0, dtype).reshape(-1)

    def _copy(self) -> list[Array]:
        """Return copies of the residual and of the velocity, in the memory of those of the step before."""
        if self._copies is None:
            self._copies = [self.ops.copy(array) for array in self._arrays]
        else:
            for memory, array in zip(self._copies, self._arrays, strict=True):
                self.ops.assign(memory, array)
        return self._copies

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

    def sent_of_all(self) -> Array:
        """Return what this rank sends, as an array of all entries, once the only collective of the exchange has begun."""
        self._recall()
        if self._all_taken:
            return self.buffer
        array = self.ops.zeros(self.numel, self.layout.residual_dtype, self.buffer)
        for indices, values in self._taken:
            array[indices] = values - self.buffer[indices]
        return array

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

    def conclude(self, sent: Sent, divisor: float, intake: Intake) -> tuple[Reduced, list[str], list[str]]:
        """End the exchange. Return what all ranks sent, and which gradients were not finite: here, and if none, elsewhere."""
        state = self.state
        if sent is not None:
            count, truncated, _ = self.outcome
            self.counts = Counts(self.target, count, state.threshold, state.stages, truncated, self.bytes_sent)
        state.step += 1
        offsets: Sequence[int] = self._host.not_finite if self.selector is self._host else self.outcome.not_finite
        bad = [slot for slot in self.layout.slots if slot.offset in offsets] if offsets else []
        own = [f"the gradient of parameter {slot.name!r}" for slot in bad]
        unknown = [f"the gradient of some parameter in bucket {self.name!r} of another rank"]
        reduced = Reduced(self.ops, sent, divisor, self.rates)
        return reduced, own, unknown if sent is None and not own else []

    def end(self, ending: Ending, before: Before) -> None:
        """End the step, so that it can be done again. It may have reached any point, or have ended and be `UNDONE` now."""
        if ending is Ending.SENT:
            self._commit()
            if self.counts is not None:
                self.tally = before.tally.with_step(self.counts)
            return
        self._restore()
        if ending is Ending.UNDONE:
            self.forget()
            self.state.restore(before.state)
            self.tally = before.tally
            if before.copies:
                for array, copied in zip(self._arrays, before.copies, strict=True):
                    self.ops.assign(array, copied)

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

    def _commit(self) -> None:
        """Keep what is left: what was taken has been sent."""
        if self._all_taken:
            self.buffer[:] = 0
        if self.velocity is not None and self._masks and not self._in_dense_steps:
            self._recall()
            taken = [slice(None)] if self._all_taken else [entries.indices for entries in self._taken]
            for indices in taken:
                self.velocity[indices] = 0

    def _restore(self) -> None:
        """Return what was taken to the residual."""
        self._recall()
        for indices, values in self._taken:
            # Zeros are those of entries that are not taken yet, or that were zero.
            if bool(values.any()):
                self.buffer[indices] = values
        self.drop_rest()

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
