"""The path of the data, shared by all frameworks: gradient -> residual -> selection -> exchange -> reduced gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from horovod_sparse.compressors.base import Compressor, Place
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.dense import DenseBucket
from horovod_sparse.core.intake import Arrived, Intake
from horovod_sparse.core.layout import Layout, Slot, check_limits
from horovod_sparse.core.residuals import Residuals
from horovod_sparse.core.selector import DeviceSelectorFor
from horovod_sparse.core.state import VERSION, check_state
from horovod_sparse.core.statistics import BucketStats, Counts, Stats, StepStats, Tally
from horovod_sparse.core.step import Ending, Step
from horovod_sparse.exchange.protocols import Collective, Reduced, Sent
from horovod_sparse.ops.protocol import Array, Ops

_NOT_FINITE = (
    "holds NaN or infinity, or overflows its residual; it was kept out of the residual. Lower the learning rate, or set "
    "not_finite='propagate'"
)

Write = Callable[[Sequence[Slot], Reduced], Iterable[str] | None]
"""Writes the reduced gradient to where the adapter wants it. Returns the parameters whose type cannot hold it, if any."""
Wait = Callable[[], Array]
"""Waits for a collective that was started, and returns its result."""
AnyBucket = Bucket | DenseBucket
UnderWay = tuple[AnyBucket, Wait]
Start = Callable[[AnyBucket, Collective], Wait]


class Pipeline:
    """Selection and reduction for the parameters of one optimizer, and what is kept of them from step to step.

    Args:
        ops: the framework's operations.
        compressor: settings and algorithm.
        world: number of workers that exchange.
        position: index of this worker among them, in [0, world).
        rank: this worker's global rank, for error messages.
        averages: True if the reduced gradient is the workers' mean, False if it is their sum; `clip` depends on it.
        device_selector: see `DeviceSelectorFor`.
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
        device_selector: DeviceSelectorFor = lambda *bucket: None,
    ) -> None:
        self.ops = ops
        self.compressor = compressor
        self.world = world
        self.position = position
        self.rank = rank
        self.averages = averages
        self._device_selector = device_selector
        self.residuals = Residuals(ops)
        self.velocities = Residuals(ops)
        """With momentum correction: velocities of the parameters in buckets and of those that are reduced dense."""
        self.buckets: list[Bucket] = []
        self.dense: list[DenseBucket] = []
        self.intake = Intake(ops, compressor, world, averages=averages)
        self.bucket_of: dict[str, AnyBucket] = {}
        self._step: Step | None = None
        self.warned = False
        """Whether this pipeline has warned of messages that are too small."""
        self._has_scaler = self._undoes = False
        """What `start_step` was told of this step."""

    def add_buckets(self, layouts: Sequence[Layout], like: Callable[[str], Array]) -> None:
        """Add buckets. `like(name)` returns an array on the device where the parameter's bucket will be kept."""
        check_limits(layouts, self.compressor, self.world)
        for layout in layouts:
            array = like(layout.name)
            buffer, velocity = self.residuals.allocate(layout, array), self._velocity_of(layout, array)
            place = Place(layout.name, self.position, self.world)
            selector = self._device_selector
            bucket = Bucket(self.ops, self.compressor, layout, place, self.rank, buffer, velocity, selector)
            self.buckets.append(bucket)
            self.bucket_of.update(dict.fromkeys(bucket.slots, bucket))

    def _velocity_of(self, layout: Layout, like: Array) -> Array | None:
        return None if self.compressor.momentum_correction is None else self.velocities.allocate(layout, like)

    @property
    def divisor(self) -> float:
        """The number by which sums of what the workers have sent are divided. It gives them this step's loss scale back."""
        return (float(self.world) if self.averages else 1.0) / self.intake.scale

    def add_dense(self, layouts: Sequence[Layout], like: Callable[[str], Array]) -> None:
        """Add buckets of parameters that are reduced dense."""
        for layout in layouts:
            array = like(layout.name)
            bucket = DenseBucket(self.ops, layout, self.world, self.rank, array, self._velocity_of(layout, array))
            self.dense.append(bucket)
            self.bucket_of.update(dict.fromkeys(bucket.slots, bucket))

    @property
    def all_buckets(self) -> list[AnyBucket]:
        return [*self.buckets, *self.dense]

    def drop(self, name: str) -> None:
        """Forget what is kept of a parameter that is no longer trained. Call it between steps, or before it arrives."""
        for kept in (self.residuals, self.velocities):
            if name in kept.views:
                kept.views[name][...] = 0

    @property
    def steps(self) -> int:
        """Number of steps in `stats`, at no cost."""
        return max((bucket.tally.steps for bucket in self.buckets), default=0)

    def stats(self) -> Stats:
        """Return counts and bytes per bucket and in total, of the last step and on average. They are computed now."""
        norms = [self.ops.norm(one.buffer) for one in self.buckets]

        def of_all(counts: Callable[[Tally], Counts]) -> StepStats:
            buckets = zip(self.buckets, norms, strict=True)
            rows = [BucketStats(b.name, b.numel, *counts(b.tally), norm, b.exchange.title) for b, norm in buckets]
            return StepStats(tuple(rows), math.fsum(one.bytes_sent for one in self.dense))

        return Stats(self.steps, of_all(lambda tally: tally.last), of_all(Tally.mean))

    # --- a step: from gradients to messages, from messages to reduced gradients ---

    def start_step(self, gradients: Iterable[Array] = (), scale: float | None = None, *, undoes: bool = False) -> None:
        """Begin a step, before its first gradient arrives. A step that has not ended is given up (`abort`).

        Args:
            gradients: if the compressor's `holds_back` is True, all gradients of this rank, with those that are reduced dense.
            scale: that of a loss scaler: gradients arrive multiplied by it, and so are the reduced ones. Residuals are not.
            undoes: whether a step that fails or is given up leaves no trace, which needs copies of the residuals and
                velocities. With a scale this is so.
        """
        self.abort()
        self._has_scaler = scale is not None
        self._undoes = undoes or self._has_scaler
        self.intake.begin(gradients, 1.0 if scale is None else scale)
        self._begun()

    def arrive(self, name: str, gradient: Array | None, learning_rate: float | None = None) -> AnyBucket | None:
        """Do as `arrive_together`, for one parameter."""
        return self.arrive_together(self.bucket_of[name], [Arrived(name, gradient, learning_rate)])

    def arrive_together(self, bucket: AnyBucket, arrived: Sequence[Arrived]) -> AnyBucket | None:
        """Let a bucket take in gradients of its parameters, and return it if it is complete. Their memory is free afterwards.

        Raises:
            RuntimeError: a gradient has arrived before in this step.
            ValueError: `lr_in_residual` cannot use a learning rate; nothing was changed.
        """
        rates = [self.intake.rate(one) for one in arrived] if self.intake.in_updates else [1.0] * len(arrived)
        step = self._begun()
        if bucket.name not in step.buckets:
            step.buckets[bucket.name] = bucket.begin_step(copies=self._undoes)
        bucket.take_in(arrived, rates, self.intake)
        return None if bucket.missing else bucket

    @property
    def is_open(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._step is not None

    def _begun(self) -> Step:
        """Return the step that has begun. If none has, one begins."""
        if self._step is None:
            self._step = Step()
        return self._step

    def advance(self, bucket: AnyBucket, result: Array, divisor: float, write: Write) -> Collective | None:
        """Continue with the result of a bucket's collective. Return the next collective, or None at the end.

        At the end, `write` is called with the parameters' slots and a `Reduced`. It divides by `divisor` and, with
        `lr_in_residual`, by the learning rate, since what is sent are updates then.
        """
        try:
            return bucket.advance(result)
        except StopIteration as end:
            sent: Sent = end.value
        reduced, own, elsewhere = bucket.conclude(sent, divisor, self.intake)
        if own or elsewhere:
            step = self._begun()
            step.failures += [f"{what} {_NOT_FINITE}" for what in own]
            step.failures_elsewhere += [f"{what} {_NOT_FINITE}" for what in elsewhere]
        for name in write(bucket.layout.slots, reduced) or ():
            self.note_overflow(name)
        return None

    def complete(self, under_way: Sequence[UnderWay], write: Write, start: Start) -> None:
        """Advance exchanges to their ends. `start` starts a bucket's next collective."""
        while under_way:
            # Every bucket's next collective is started before the first of them is waited for.
            following = []
            for bucket, result in under_way:
                collective = self.advance(bucket, result(), self.divisor, write)
                if collective is not None:
                    following.append((bucket, start(bucket, collective)))
            under_way = following

    def note_not_finite(self, what: str) -> None:
        """Let the step fail, because the gradient of `what` is not finite, on this rank or another."""
        self._begun().failures_elsewhere.append(f"the gradient of {what} {_NOT_FINITE}")

    def note_overflow(self, name: str) -> None:
        """Let the step fail, because a parameter's type cannot hold its reduced gradient."""
        self._begun().failures_elsewhere.append(
            f"the reduced gradient of parameter {name!r} is finite, but beyond the range of its type; what residuals had "
            "sent has returned to them. Use gradients of bfloat16 or float32, or a larger ratio"
        )

    @property
    def fails_here(self) -> bool:
        """Whether the step is known to fail because of this worker's own gradients."""
        return bool(self._begun().failures)

    @property
    def fails(self) -> bool:
        """Whether the step is known to fail."""
        return self.fails_here or bool(self._begun().failures_elsewhere)

    def end_step(self) -> None:
        """End a step after all reduced gradients are there. It succeeds on every rank or fails on every rank.

        If it fails (`Ending.FAILED`, or `UNDONE`: see `start_step`), it raises FloatingPointError on every rank, unless
        `not_finite="propagate"`, or a loss scaler leaves out the update. Training can go on.
        """
        step = self._begun()
        found = step.failures + step.failures_elsewhere
        failed = Ending.UNDONE if self._undoes else Ending.FAILED
        step.ending = failed if found else Ending.SENT
        self._finish()
        self.warned = self.warned or any(bucket.warn_truncated() for bucket in self.buckets)
        if found and not self._has_scaler and self.compressor.not_finite == "raise":
            raise FloatingPointError(f"rank {self.rank}: {found[0]}")

    def _finish(self) -> None:
        """End the step as was decided. If an interrupt comes, this is done again, from the beginning."""
        step = self._step
        if step is None or step.ending is None:
            return
        reached = [bucket for bucket in self.all_buckets if bucket.name in step.buckets]
        for bucket in reached:
            bucket.end(step.ending, step.buckets[bucket.name])
        for bucket in reached:
            bucket.close()
        self._step = None

    def abort(self) -> None:
        """Give up the step that has begun, if there is one (`Ending.UNDONE`). If its ending was decided, complete that."""
        if self._step is not None and self._step.ending is None:
            self._step.ending = Ending.UNDONE
        self._finish()

    # --- state: a step that has begun is given up ---

    def state_dict(self) -> dict[str, Any]:
        """Return residuals and adaptive state by parameter name: arrays, numbers, strings and lists only.

        Every parameter carries a copy of its bucket's adaptive state, so that different buckets can be built from it.
        "learning_rates" has 1.0 for every residual if they hold updates, and is empty if they hold gradients.
        """
        self._finish()
        return {
            "version": VERSION,
            "residuals": self.residuals.state_dict(),
            "velocities": self.velocities.state_dict(),
            "learning_rates": dict.fromkeys(self.residuals.shapes, 1.0) if self.compressor.in_updates else {},
            "adaptive": {name: bucket.state.state_dict() for bucket in self.buckets for name in bucket.slots},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, if `check_state` accepts it. The buckets may differ."""
        check_state(state, self.compressor, self.residuals.shapes, self.velocities.shapes)
        self.abort()
        self.residuals.load_state_dict(state["residuals"])
        self.velocities.load_state_dict(state["velocities"])
        for bucket in self.buckets:
            bucket.forget()
            bucket.state.load_state_dict(state["adaptive"][bucket.name])

    def rescale(self, factor: float) -> None:
        """Multiply residuals and velocities by `factor`."""
        self.decay(factor)
        self.velocities.rescale(factor)
        for bucket in self.buckets:
            bucket.state.rescale(factor)

    def decay(self, factor: float) -> None:
        """Multiply residuals, but nothing else, by `factor`. Call it between steps, on all ranks."""
        self._finish()
        if factor != 1.0:
            self.residuals.rescale(factor)
            for bucket in self.buckets:
                bucket.forget()

    def reset(self) -> None:
        """Start afresh: residuals are zero, adaptive state and statistics are as before the first step."""
        self.abort()
        self.residuals.reset()
        self.velocities.reset()
        for bucket in self.buckets:
            bucket.reset()
