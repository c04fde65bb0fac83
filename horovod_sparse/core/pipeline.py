"""The path of the data, shared by all frameworks: gradient -> residual -> selection -> exchange -> reduced gradient.

A `Pipeline` belongs to one optimizer. The adapter tells it which gradients have arrived, carries out the collectives, and
provides the memory that the reduced gradients are written to. Imports no framework.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast

from horovod_sparse.compressors import momentum
from horovod_sparse.compressors.base import Compressor, Place
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.layout import Layout, Slot
from horovod_sparse.core.residuals import Residuals
from horovod_sparse.core.selector import Selector, SelectorFor, by_verbs
from horovod_sparse.core.state import VERSION, check_state
from horovod_sparse.core.statistics import Counts, Stats, StepStats, Tally
from horovod_sparse.exchange import cost, protocols, wire
from horovod_sparse.exchange.protocols import Collective, Reduced, Sent, Task
from horovod_sparse.ops.cached import Known
from horovod_sparse.ops.protocol import Array, Moving, Notes, Ops, Part, Selection, Wanted

_LASTING = 100
"""Number of consecutive steps with a truncated message after which a warning is issued."""
_FEW = 4
"""If more than one entry in `_FEW` exceeds the cut, none are kept: that would cost more memory and time than it saves."""


Write = Callable[[Sequence[Slot], Reduced], None]
"""Writes the reduced gradient to where the adapter wants it."""


class Arrived(NamedTuple):
    """A parameter's gradient in a step."""

    name: str
    gradient: Array | None
    """None if the parameter has no gradient in this step."""
    learning_rate: float | None = None
    """Learning rate of the step, for `lr_in_residual`."""


class Pipeline:
    """Residuals, selection and reduction for the parameters of one optimizer.

    Args:
        ops: the framework's verbs.
        compressor: settings and algorithm.
        world: number of workers that exchange.
        position: index of this worker among them, in [0, world).
        rank: this worker's global rank, for error messages.
        averages: True if the reduced gradient is the workers' mean, False if it is their sum; `clip_norm` depends on it.
        selector_for: returns the selector that selects on a bucket's device, or None.
    """

    def __init__(
        self,
        ops: Ops,
        compressor: Compressor,
        *,
        world: int,
        position: int,
        rank: int,
        averages: bool = True,
        selector_for: SelectorFor = by_verbs,
    ) -> None:
        self.ops = ops
        self.compressor = compressor
        self.world = world
        self.position = position
        self.rank = rank
        self.averages = averages
        self._selector_for = selector_for
        self.residuals = Residuals(ops)
        self.velocities = Residuals(ops)
        """With momentum correction: velocities of the parameters in buckets and of those that are reduced dense."""
        self.buckets: list[Bucket] = []
        self.dense_bytes_sent = 0.0
        self._bucket_of: dict[str, Bucket] = {}
        self._offsets: dict[str, int] = {}
        """Index of each parameter's first entry in its bucket, by parameter name."""
        self._dense: dict[str, Layout] = {}
        """Layouts of the parameters that are reduced dense, by the first parameter's name."""
        self._learning_rates: dict[str, float] = {}
        self._not_finite: list[str] = []
        """What held NaN or infinity in this step, with this rank's gradients first."""
        self._open: list[Bucket] = []
        """Buckets that a gradient of this step has reached."""
        self._ended: list[Bucket] = []
        """Buckets of the last step, if it can be discarded."""
        self._rates_before: dict[str, float] = {}
        """Learning rates before this step or the last one. The next field holds the velocities of what is reduced dense."""
        self._velocities_before: dict[str, Array] = {}
        self._clip_factor: float | None = None
        """Clipping factor of this step, with `clip_scope="model"`."""
        self._warned = False

    def add_buckets(self, layouts: Sequence[Layout], like: Callable[[str], Array]) -> None:
        """Add buckets. `like(name)` returns an array on the device where the parameter's bucket will be kept."""
        check_limits(layouts, self.compressor, self.world)
        for layout in layouts:
            buffer = self.residuals.allocate(layout, like(layout.name))
            corrected = self.compressor.momentum_correction is not None
            bucket = Bucket(
                layout,
                buffer,
                self.velocities.allocate(layout, like(layout.name)) if corrected else None,
                self.compressor.new_state(self._place(layout)),
                {slot.name for slot in layout.slots},
                selector=self._selector_for(self.compressor, layout, buffer),
            )
            self.buckets.append(bucket)
            self._bucket_of.update((slot.name, bucket) for slot in layout.slots)
            self._offsets.update((slot.name, slot.offset) for slot in layout.slots)

    def rebind(self, bucket: Bucket, buffer: Array, velocity: Array | None) -> None:
        """Use other memory for a bucket's residual and velocity from now on. Call it between two steps."""
        self.residuals.rebind(bucket.name, buffer)
        bucket.buffer, bucket.velocity = buffer, velocity
        if velocity is not None:
            self.velocities.rebind(bucket.name, velocity)

    def add_dense(self, layouts: Sequence[Layout], like: Callable[[str], Array]) -> None:
        """Register the parameters that the adapter reduces dense. Those of one layout are reduced together."""
        for layout in layouts:
            self._dense[layout.name] = layout
            if self.compressor.momentum_correction is not None:
                self.velocities.allocate(layout, like(layout.name))

    def _place(self, layout: Layout) -> Place:
        return Place(layout.name, self.position, self.world)

    # --- gradients in ---

    def start_step(self, gradients: Iterable[Array] = ()) -> None:
        """Begin a step, before its first gradient arrives. A step that has not ended is given up (`abort`).

        If the compressor's `holds_back` is True, `gradients` are all gradients of this rank, including those that are reduced
        dense.
        """
        self.abort()
        if self.compressor.holds_back:
            self._clip_factor = momentum.clip_factor(self.ops, gradients, self._clip_limit())

    def bucket_of(self, name: str) -> Bucket:
        """Return the bucket that a parameter is in."""
        return self._bucket_of[name]

    def arrive(self, name: str, gradient: Array | None, learning_rate: float | None = None) -> Bucket | None:
        """Do as `arrive_together`, for one parameter."""
        return self.arrive_together(self._bucket_of[name], [Arrived(name, gradient, learning_rate)])

    def arrive_together(self, bucket: Bucket, arrived: Iterable[Arrived]) -> Bucket | None:
        """Take in gradients of a bucket. Return the bucket if it is complete, else None.

        The gradients' memory is free afterwards. NaN and infinity are kept out of the residual. A sum that would overflow the
        residual stays at the largest number of its type. In both cases the bucket's exchange returns None on every rank.
        """
        parts: list[Part] = []
        for name, gradient, learning_rate in arrived:
            if name not in bucket.missing:
                raise RuntimeError(f"the gradient of {name!r} arrived twice in one step")
            if not bucket.in_step:
                self._enter(bucket)
            bucket.missing.discard(name)
            if self.compressor.lr_in_residual:
                gradient = self._rescaled(bucket, name, gradient, learning_rate)
            if gradient is None:
                self._absorb_nothing(bucket, name)
            else:
                parts.append((self._offsets[name], self.clipped(gradient, bucket.layout.residual_dtype)))
        if parts:
            self._absorb(bucket, parts)
        return None if bucket.missing else bucket

    def _enter(self, bucket: Bucket) -> None:
        """Add a bucket to the step when its first gradient arrives."""
        discardable = self.compressor.discardable
        if discardable and not self._open:
            self._rates_before = dict(self._learning_rates)
            self._velocities_before.clear()
        self._open.append(bucket)
        bucket.open(self.ops, discardable=discardable)

    def drop(self, name: str) -> None:
        """Forget what is kept of a parameter that is no longer trained. Call it between steps, or before it arrives."""
        if name in self._bucket_of:
            self.residuals.view(name)[:] = 0
            self._bucket_of[name].forget()
        if self.compressor.momentum_correction is not None:
            self.velocities.view(name)[:] = 0

    def _absorb(self, bucket: Bucket, parts: list[Part]) -> None:
        """Take gradients into the residual, and into the velocity if there is one."""
        correction = self.compressor.momentum_correction
        selector = self._selector(bucket)
        if selector is not None:
            # `_learn` finds out what is not finite.
            for offset, gradient in parts:
                self._hand_to(selector, bucket, offset, gradient)
            return
        if not bucket.noted:
            bucket.noted, bucket.notes = True, self._notes(bucket)
        moving = None
        if correction is not None:
            moving = Moving(bucket.velocity, correction.momentum, correction.nesterov)
        # The notes follow the order in the buffer, so the parts must too.
        parts.sort(key=itemgetter(0))
        for (offset, _), bad in zip(parts, self.ops.absorb(bucket.buffer, parts, bucket.notes, moving), strict=True):
            if bad:
                self._not_finite.append(f"parameter {bucket.name_at(offset)!r}")
                bucket.finite = False

    def _absorb_nothing(self, bucket: Bucket, name: str) -> None:
        """Do as `_absorb`, for a parameter without a gradient."""
        correction = self.compressor.momentum_correction
        selector = self._selector(bucket)
        if selector is not None:
            self._hand_to(selector, bucket, self._offsets[name], None)
        elif correction is not None:
            correction.accumulate(self.ops, self.residuals.view(name), self.velocities.view(name), None)

    def _hand_to(self, selector: Selector, bucket: Bucket, offset: int, gradient: Array | None) -> None:
        correction = self.compressor.momentum_correction
        velocity = bucket.velocity if correction is not None else None
        selector.absorb(offset, gradient, bucket.state, self._asked(bucket), velocity=velocity, correction=correction)

    def _selector(self, bucket: Bucket) -> Selector | None:
        """Return what selects in this step, or None if the host does."""
        return None if bucket.state.step < self.compressor.dense_steps else bucket.selector

    def _asked(self, bucket: Bucket) -> int:
        """Return k of this step."""
        return self.compressor.asked(bucket.layout.numel, self.compressor.ratio_at(bucket.state.step))

    def _notes(self, bucket: Bucket) -> Notes | None:
        state = bucket.state
        if bucket.selector is not None or state.step < self.compressor.dense_steps:
            return None
        room = min(state.room, bucket.layout.numel // _FEW)
        return self.ops.notes(bucket.buffer, Wanted(state.cut, room, self.compressor.needs_sums))

    def _select(self, bucket: Bucket, k: int, capacity: int) -> Selection:
        # Drop the notes here: they take memory, and the task lives until the step ends.
        notes, bucket.notes = bucket.notes, None
        known = Known(self.ops, bucket.buffer, *((None, None) if notes is None else (notes.sums, notes.above)))
        return self.compressor.select(cast(Ops, known), bucket.buffer, k, capacity, bucket.state)

    def check_reduced(self, name: str, reduced: Array) -> bool:
        """Return whether a reduced gradient that did not come through a bucket is finite. If not, the step fails."""
        finite = self.ops.all_finite(reduced)
        if not finite:
            self._not_finite.append(f"parameter {name!r}")
        return finite

    def finish_dense(self, name: str, reduced: Array) -> None:
        """Apply momentum, in place, to a reduced gradient that did not come through a bucket.

        If several parameters are reduced together, `name` is the first one's, and their gradients lie one after the other.
        """
        slots = self._dense[name].slots
        if not self.ops.all_finite(reduced):
            flat = reduced.reshape(-1)
            for slot in slots:
                self.check_reduced(slot.name, flat[slot.offset : slot.offset + slot.numel])
            return
        correction = self.compressor.momentum_correction
        if correction is not None:
            velocity = self.velocities.buffer(name)
            if self.compressor.discardable:
                self._velocities_before[name] = self.ops.copy(velocity)
            corrected = self.ops.copy(velocity)
            corrected[:] = 0
            correction.accumulate(self.ops, corrected, velocity, reduced)
            reduced[...] = corrected.reshape(reduced.shape)

    def clipped(self, gradient: Array, dtype: str) -> Array:
        """Return this rank's gradient of a parameter. With `clip_norm` it has type `dtype` and is scaled down if necessary."""
        compressor = self.compressor
        if compressor.clip_norm is None:
            return gradient
        if not compressor.holds_back:
            return momentum.clip(self.ops, gradient, self._clip_limit(), dtype)
        if self._clip_factor is None:
            raise RuntimeError("start_step must be given all gradients with clip_scope='model'; this is a defect")
        return momentum.scaled(self.ops, gradient, self._clip_factor, dtype)

    def _clip_limit(self) -> float:
        assert self.compressor.clip_norm is not None
        return momentum.clip_limit(self.compressor.clip_norm, self.world, averages=self.averages)

    def _rescaled(self, bucket: Bucket, name: str, gradient: Array | None, learning_rate: float | None) -> Array | None:
        """Keep a residual in units of the update. If the learning rate is 0, return None: the gradient adds nothing."""
        if learning_rate is None:
            raise ValueError("learning_rate must be given with lr_in_residual=True, got None")
        if learning_rate == 0.0:
            return None
        factor = self._learning_rates.get(name, learning_rate) / learning_rate
        if factor != 1.0:
            residual = self.residuals.view(name)
            residual *= factor
        self._learning_rates[name] = learning_rate
        bucket.change_unit(factor)
        return gradient

    # --- a bucket's exchange ---

    def begin(self, bucket: Bucket) -> Collective:
        """Select from a complete bucket; return its exchange's first collective. What is not selected stays in the residual."""
        compressor, state, numel = self.compressor, bucket.state, bucket.layout.numel
        bucket.missing = {slot.name for slot in bucket.layout.slots}
        k, selector = self._asked(bucket), self._selector(bucket)
        capacity = compressor.room(numel, k, self.world)
        correction = compressor.momentum_correction
        in_dense_steps = state.step < compressor.dense_steps
        exchange = protocols.dense if in_dense_steps else compressor.exchange
        masks = correction is not None and correction.masking and not in_dense_steps
        if selector is not None:
            exchange = protocols.launched
        bucket.task = Task(
            ops=self.ops,
            bucket=bucket.name,
            buffer=bucket.buffer,
            velocity=bucket.velocity if masks else None,
            capacity=capacity,
            world=self.world,
            rank=self.rank,
            asked=numel if exchange is protocols.dense else k,
            finite=bucket.finite,
            residual=compressor.residual,
            select=lambda: self._select(bucket, k, capacity),
            checksum=lambda: state.checksum() ^ state.fingerprint,
            propose=lambda: state.proposal,
            observe=lambda count, proposed: compressor.observe(state, count, k, proposed),
            launch=lambda: _some(selector).select(state, k, capacity),
            learn=lambda: self._learn(bucket, _some(selector), k),
        )
        bucket.finite = True
        bucket.bytes_sent, bucket.rounds = 0.0, 0
        bucket.exchange = exchange(bucket.task)
        first = next(bucket.exchange)
        return self._counted(bucket, first)

    def _learn(self, bucket: Bucket, selector: Selector, k: int) -> tuple[int, int]:
        """Wait for the selector. Return how many entries are sent and how many had no room."""
        told = selector.finish(bucket.state, k)
        if told["not_finite"]:
            self._not_finite[:0] = [f"parameter {bucket.name_at(offset)!r}" for offset in selector.not_finite()]
        sent, found = int(told["sent"]), int(told["found"])
        room = self.compressor.room(bucket.layout.numel, k, self.world)
        return sent, found - sent if sent == room and found > room else 0

    def advance(
        self,
        bucket: Bucket,
        result: Array,
        divisor: float,
        write: Write,
    ) -> Collective | None:
        """Continue with the result of a bucket's collective. Return the next collective, or None at the end.

        At the end, `write` is called with the parameters' slots and a `Reduced`. It holds the bucket's entries, rank by rank in
        rank order, divided by `divisor`. If some rank's gradient was not finite, it holds nothing. The order is the same on
        all ranks, so that the sums of floats are equal to the last bit.
        """
        assert bucket.exchange is not None
        try:
            return self._counted(bucket, bucket.exchange.send(result))
        except StopIteration as end:
            self._finish(bucket, end.value, divisor, write)
            return None

    def _counted(self, bucket: Bucket, collective: Collective) -> Collective:
        bucket.rounds += 1
        size = collective.message.nbytes
        gathers = collective.kind == "allgather"
        bucket.bytes_sent += (
            cost.allgather_bytes(size, self.world) if gathers else cost.allreduce_bytes(size, self.world)
        )
        return collective

    def _finish(
        self,
        bucket: Bucket,
        sent: Sent,
        divisor: float,
        write: Write,
    ) -> None:
        task, state = bucket.task, bucket.state
        assert task is not None
        bucket.exchange = None
        state.step += 1
        if bucket.mixed_factors:
            bucket.start_again(self.compressor)
        if sent is None:
            self._not_finite.append(f"some parameter in bucket {bucket.name!r} of another rank")
        else:
            counted = (task.asked, task.count, task.overflow, state.threshold, state.stages, bucket.bytes_sent)
            bucket.counts = Counts(*counted)
        write(bucket.layout.slots, Reduced(self.ops, sent, divisor))

    def end_step(self) -> None:
        """End a step after all reduced gradients are there. It succeeds on every rank or fails on every rank.

        It fails if some rank's gradient held NaN or infinity, or overflowed a residual. Then what every bucket had
        sent returns to the residuals. They are finite and also hold the step's finite gradients; momentum has moved on. A
        failed step raises FloatingPointError on every rank, unless `not_finite="propagate"`. Training can go on.
        """
        found, self._not_finite = self._not_finite, []
        self._ended, self._open = self._open, []
        self._clip_factor = None
        for bucket in self._ended:
            bucket.end(succeeded=not found)
            if bucket.truncated_steps >= _LASTING and not self._warned:
                self._warn_truncated(bucket)
        if found and self.compressor.not_finite == "raise":
            raise FloatingPointError(
                f"rank {self.rank}: the gradient of {found[0]} holds NaN or infinity, or overflows its residual; it was kept "
                "out of the residual. Lower the learning rate, or with dynamic loss scaling use not_finite='propagate'"
            )

    def _warn_truncated(self, bucket: Bucket) -> None:
        self._warned = True
        last = bucket.tally.last
        warnings.warn(
            f"horovod_sparse: rank {self.rank}: for {bucket.truncated_steps} steps more entries of bucket {bucket.name!r} "
            f"qualified than its message has room for (in the last step {last.sent + last.overflow:.0f}, room for "
            f"{last.sent:.0f}); the rest waits in the residual. Raise capacity (now {self.compressor.capacity:g}) or ratio",
            stacklevel=2,
        )

    def abort(self) -> None:
        """Give up the step that has begun, if there is one, so that the next can begin after an exception.

        What the step had taken returns to the residuals. Every parameter's residual is then as before the step, or also holds
        its whole gradient if that had arrived. With `discardable`, everything is as before the step.
        """
        given_up, self._open = self._open, []
        self._not_finite.clear()
        self._clip_factor = None
        self._bring_back(given_up)

    def discard_step(self) -> None:
        """Throw away the step that has begun or, between two steps, the last one. Everything is then as before that step.

        Raises:
            RuntimeError: the compressor is not `discardable`, or no step has ended since the last one was discarded.
        """
        check_discardable(self.compressor)
        if self._open:
            self.abort()
            return
        if not self._ended:
            raise RuntimeError("there is no step to discard; discard a step once, after it and before the next one")
        ended, self._ended = self._ended, []
        self._bring_back(ended)

    def _bring_back(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            if bucket.in_step:
                bucket.give_up(self.ops, self.compressor)
            else:
                bucket.bring_back(self.ops, self.compressor)
        if self.compressor.discardable and buckets:
            self._learning_rates = dict(self._rates_before)
            for name, velocity in self._velocities_before.items():
                self.ops.assign(self.velocities.buffer(name), velocity)
            self._velocities_before.clear()

    # --- statistics and state ---

    def stats(self) -> Stats:
        """Return counts and bytes per bucket and in total, of the last step and on average. They are computed now."""
        pairs = [
            bucket.tally.stats(bucket.name, bucket.layout.numel, self.ops.norm(bucket.buffer))
            for bucket in self.buckets
        ]
        steps = max((bucket.tally.steps for bucket in self.buckets), default=0)
        return Stats(
            steps,
            StepStats(tuple(last for last, _ in pairs), self.dense_bytes_sent),
            StepStats(tuple(mean for _, mean in pairs), self.dense_bytes_sent),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return residuals and adaptive state by parameter name: arrays, numbers, strings and lists only.

        Every parameter carries a copy of its bucket's adaptive state, so that different buckets can be built from it.
        """
        return {
            "version": VERSION,
            "residuals": self.residuals.state_dict(),
            "velocities": self.velocities.state_dict(),
            "learning_rates": dict(self._learning_rates),
            "adaptive": {name: bucket.state.state_dict() for name, bucket in self._bucket_of.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, strictly for the same model. The buckets may differ."""
        check_state(state, self.compressor, self.residuals.shapes, self.velocities.shapes)
        self._begin_afresh()
        self.residuals.load_state_dict(state["residuals"])
        self.velocities.load_state_dict(state["velocities"])
        self._learning_rates = dict(state["learning_rates"])
        for bucket in self.buckets:
            bucket.forget()
            bucket.state.load_state_dict(state["adaptive"][bucket.name])

    def rescale(self, factor: float) -> None:
        """Multiply residuals and velocities by `factor`. Earlier steps can no longer be discarded: they used another unit."""
        self._ended = []
        self.residuals.rescale(factor)
        self.velocities.rescale(factor)
        for bucket in self.buckets:
            bucket.forget()
            bucket.state.rescale(factor)

    def reset(self) -> None:
        """Start afresh: residuals are zero, adaptive state and statistics are as before the first step."""
        self._begin_afresh()
        self.residuals.reset()
        self.velocities.reset()
        self._learning_rates.clear()
        for bucket in self.buckets:
            bucket.forget()
            bucket.state = self.compressor.new_state(self._place(bucket.layout))
            bucket.tally = Tally()
            bucket.truncated_steps = 0

    def _begin_afresh(self) -> None:
        """Give up the step that has begun, and forget the last one, so that none can be discarded."""
        self.abort()
        self._ended = []


def check_discardable(compressor: Compressor) -> None:
    """Raise RuntimeError unless `discard_step` can be called."""
    if not compressor.discardable:
        raise RuntimeError(
            f"discardable must be True in the compression to discard a step, got False; make it "
            f"{type(compressor).__name__}(..., discardable=True), which keeps a copy of the residuals"
        )


def _some(selector: Selector | None) -> Selector:
    assert selector is not None
    return selector


def check_limits(layouts: Sequence[Layout], compressor: Compressor, world: int) -> None:
    """Raise ValueError when a bucket is too large for its messages."""
    for layout in layouts:
        gathers = compressor.exchange is not protocols.shared_indices
        most = compressor.most_room(layout.numel, world) if gathers else 0
        wire.check_limits(layout.name, layout.numel, most, world)
