"""The path of the data, shared by all frameworks: gradient -> residual -> selection -> exchange -> reduced gradient."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from horovod_sparse.exchange.protocols import Collective, Reduced
from horovod_sparse.ops.protocol import Array, Ops

Write = Callable[[Sequence[Slot], Reduced], None]
"""Writes the reduced gradient to where the adapter wants it."""
Everyone = Callable[[Any], list[Any]]
"""Returns every worker's value."""
Wait = Callable[[], Array]
"""Waits for a collective that was started, and returns its result."""
AnyBucket = Bucket | DenseBucket
UnderWay = tuple[AnyBucket, Wait]
Start = Callable[[AnyBucket, Collective], Wait]


@dataclass(slots=True)
class Step:
    """A step of a pipeline that has begun."""

    buckets: dict[str, AnyBucket] = field(default_factory=dict)
    """The buckets that a gradient of this step has reached, by name."""
    fails: bool = False
    """Whether a gradient of some rank is known not to be finite."""
    bad: list[str] = field(default_factory=list)
    """Parameters beside the buckets whose gradients were not finite."""
    given_up: bool = False
    """Whether this rank gives the step up."""


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
        self._warned_not_finite = False
        self.is_broken = False
        """Whether an exchange has ended by an exception, so that nobody knows what the other ranks have."""

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

    def start_step(self, gradients: Iterable[Array] = (), scale: float = 1.0) -> None:
        """Begin a step, before its first gradient arrives. A step that has not ended is given up (`abort`).

        Args:
            gradients: if the compressor's `holds_back` is True, all gradients of this rank, with those that are reduced dense.
            scale: that of a loss scaler: gradients arrive multiplied by it, and so are the reduced ones. Residuals are not.
        """
        if self.is_broken:
            raise RuntimeError(
                f"rank {self.rank}: an exchange has ended by an exception before, so what waits here may not fit to the other "
                "ranks; load a state on all ranks, call compression.reset() on all, or make a new compression"
            )
        self.abort()
        self.intake.begin(gradients, scale)
        self._begun()

    def arrive(self, name: str, gradient: Array | None, learning_rate: float | None = None) -> AnyBucket | None:
        """Do as `arrive_together`, for one parameter."""
        return self.arrive_together(self.bucket_of[name], [Arrived(name, gradient, learning_rate)])

    def arrive_together(self, bucket: AnyBucket, arrived: Sequence[Arrived]) -> AnyBucket | None:
        """Let a bucket take in gradients of its parameters, and return it if it is complete.

        The gradients must stay as they are until the step ends. What waits of a parameter without a gradient is set aside.

        Raises:
            RuntimeError: a gradient has arrived before in this step.
            ValueError: `lr_in_residual` cannot use a learning rate; nothing was changed.
        """
        rates = [self.intake.rate(one) for one in arrived] if self.intake.in_updates else [1.0] * len(arrived)
        self._reach(bucket)
        for name, gradient, _ in arrived:
            if gradient is None:
                self.residuals.set_aside(name)
            elif self.residuals.aside:
                self.residuals.take_up(name)
        bucket.take_in(arrived, rates, self.intake)
        return None if bucket.missing else bucket

    def _reach(self, bucket: AnyBucket) -> None:
        step = self._begun()
        if bucket.name not in step.buckets:
            step.buckets[bucket.name] = bucket
            bucket.begin_step()

    def _begun(self) -> Step:
        """Return the step that has begun. If none has, one begins."""
        if self._step is None:
            self._step = Step()
        return self._step

    def spoil(self, bucket: AnyBucket) -> AnyBucket:
        """Let this rank give the step up, and return a bucket that is to say so: its exchange has not begun yet."""
        self._begun().given_up = True
        self._reach(bucket)
        bucket.spoil()
        return bucket

    def give_up(self) -> None:
        """Let this rank give the step up, which fails on all ranks because of what is sent beside the buckets."""
        step = self._begun()
        step.given_up = step.fails = True

    def advance(self, bucket: AnyBucket, result: Array) -> Collective | None:
        """Continue with the result of a bucket's collective. Return the next collective, or None at the end."""
        try:
            return bucket.advance(result)
        except StopIteration as end:
            if not bucket.receive(end.value):
                self._begun().fails = True
        return None

    def complete(self, under_way: Sequence[UnderWay], start: Start) -> None:
        """Advance exchanges to their ends. `start` starts a bucket's next collective."""
        self.is_broken = True
        while under_way:
            # Every bucket's next collective is started before the first of them is waited for.
            left, following = deque(under_way), []
            try:
                while left:
                    bucket, wait = left.popleft()
                    collective = self.advance(bucket, wait())
                    if collective is not None:
                        following.append((bucket, start(bucket, collective)))
            except Exception:
                # All ranks have started these. What has not ended could not be started again.
                for _, wait in left:
                    with suppress(Exception):
                        wait()
                raise
            under_way = following
        self.is_broken = False

    def fail(self, names: Sequence[str] = ()) -> None:
        """Let the step fail, as it must on all ranks: gradients of these parameters beside the buckets are not finite."""
        step = self._begun()
        step.fails = True
        step.bad += names

    @property
    def fails(self) -> bool:
        """Whether the step is known to fail."""
        return self._begun().fails

    def end_step(self, write: Write, everyone: Everyone | None = None) -> None:
        """End a step of which all exchanges have ended, and write all reduced gradients.

        If a gradient of some rank is not finite, the reduced gradients of its bucket are NaN on every rank, and the step has
        never been: residuals, velocities and adaptive state are as before it. `everyone` then tells all ranks why.

        Raises:
            RuntimeError: another rank has given the step up. All ranks may go on.
        """
        step, divisor = self._begun(), self.divisor
        reached = [bucket for bucket in self.all_buckets if bucket.name in step.buckets]
        if step.fails:
            self._tell(step, reached, everyone)
        for bucket in reached:
            # Before the reduced gradients take the place of those that are to be taken back.
            if step.fails:
                bucket.undo(self.intake)
            else:
                bucket.commit(divisor, self.intake)
        for bucket in reached:
            if not step.given_up:
                write(bucket.layout.slots, bucket.reduced(divisor))
            bucket.close()
        self._step = None
        self.warned = self.warned or any(bucket.warn_truncated() for bucket in self.buckets)

    def _tell(self, step: Step, reached: Sequence[AnyBucket], everyone: Everyone | None) -> None:
        """Warn once of gradients that are not finite. Raise RuntimeError if another rank has given the step up."""
        mine: dict[str, Any] = {
            "rank": self.rank,
            "given up": step.given_up,
            "bad": [*step.bad, *(name for bucket in reached for name in bucket.bad())],
        }
        told = [mine] if everyone is None else everyone(mine)
        gone = [one["rank"] for one in told if one["given up"]]
        if gone and not step.given_up:
            self.abort()
            raise RuntimeError(
                f"rank {self.rank}: rank {gone[0]} has given up this step after an exception, so this rank gives it up too; "
                "see what the other rank reports. Nothing of the step is left on any rank, and all ranks may go on"
            )
        bad = [f"{name!r} on rank {one['rank']}" for one in told for name in one["bad"]]
        if not self._warned_not_finite and not gone:
            self._warned_not_finite = True
            warnings.warn(
                f"horovod_sparse: rank {self.rank}: the gradient of {bad[0] if bad else 'a parameter on another rank'} holds "
                "NaN or infinity, or a sum of gradients overflows. The reduced gradient of its bucket is NaN on all ranks, as "
                "a dense average would be, and residuals are as before the step. This is said once",
                stacklevel=2,
            )

    def knows_why(self) -> bool:
        """Return whether a gradient of this rank is what makes the step fail."""
        step = self._begun()
        return bool(step.bad) or any(bucket.bad() for bucket in step.buckets.values())

    def take_warnings(self, other: Pipeline) -> None:
        """Take it that this pipeline has warned where another one of the same process has."""
        self.warned, self._warned_not_finite = other.warned, other._warned_not_finite

    def abort(self) -> None:
        """Forget the step that has begun, if there is one, on this rank alone. It has never been."""
        step, self._step = self._step, None
        for bucket in () if step is None else step.buckets.values():
            bucket.undo(self.intake)
            bucket.close()

    # --- state, between two steps ---

    def state_dict(self) -> dict[str, Any]:
        """Return residuals and adaptive state by parameter name: arrays, numbers, strings and lists only.

        Every parameter carries a copy of its bucket's adaptive state, so that different buckets can be built from it.
        "learning_rates" has 1.0 for every residual if they hold updates, and is empty if they hold gradients.
        """
        return {
            "version": VERSION,
            "residuals": self.residuals.state_dict(),
            "velocities": self.velocities.state_dict(),
            "learning_rates": dict.fromkeys(self.residuals.shapes, 1.0) if self.compressor.lr_in_residual else {},
            "adaptive": {name: bucket.state.state_dict() for bucket in self.buckets for name in bucket.slots},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, if `check_state` accepts it. The buckets may differ."""
        check_state(state, self.compressor, self.residuals.shapes, self.velocities.shapes)
        self.abort()
        self.is_broken = False
        self.residuals.load_state_dict(state["residuals"])
        self.velocities.load_state_dict(state["velocities"])
        for bucket in self.buckets:
            bucket.forget()
            bucket.state.load_state_dict(state["adaptive"][bucket.name])

    def rescale(self, factor: float) -> None:
        """Multiply residuals and velocities by `factor`."""
        if factor != 1.0:
            self.residuals.rescale(factor)
        self.velocities.rescale(factor)
        for bucket in self.buckets:
            bucket.forget()
            bucket.state.rescale(factor)

    def reset(self) -> None:
        """Start afresh: residuals are zero, adaptive state and statistics are as before the first step."""
        self.abort()
        self.is_broken = False
        self.residuals.reset()
        self.velocities.reset()
        for bucket in self.buckets:
            bucket.reset()
