"""The data's way, once for every framework: gradient -> residual -> selection -> exchange -> reduced gradient.

A `Pipeline` belongs to one optimizer. The adapter tells it which gradients have arrived, carries out the collectives, and
hands in the memory that the reduced gradients are written to. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from horovod_sparse import cost, exchanges, feedback, wire
from horovod_sparse.buckets import Layout, Slot
from horovod_sparse.compressors.base import BucketState, Compressor, Place
from horovod_sparse.exchanges import Collective, Entries, Task
from horovod_sparse.known import join
from horovod_sparse.ops import NOTHING, Absorbed, Array, Ops, Selection, Wanted
from horovod_sparse.residuals import Residuals
from horovod_sparse.selector import Selector, SelectorFor, by_verbs
from horovod_sparse.statistics import Counts, Stats, StepStats, Tally

VERSION = 3
"""Of the state."""
PARTS = ("residuals", "velocities", "learning_rates", "adaptive")
"""Of the state, each by parameter name."""
_FEW = 4
"""Of more entries above a cut than one in so many nothing is kept: it would cost more memory and time than it saves."""


@dataclass
class Bucket:
    """The state of one bucket on this rank."""

    layout: Layout
    buffer: Array
    """Residual plus the gradients that have arrived in this step."""
    velocity: Array | None
    """With momentum correction."""
    state: BucketState
    missing: set[str] = field(default_factory=set)
    """Parameters whose gradient has not arrived in this step."""
    absorbed: dict[str, Absorbed] = field(default_factory=dict)
    """What the gradients of this step that have arrived have shown of the buffer."""
    finite: bool = True
    """Whether all gradients of this step are."""
    selector: Selector | None = None
    """Selects on the device; without one the array verbs do."""
    task: Task | None = None
    """The exchange under way, and below it the generator that carries it out and the bytes that it has sent."""
    exchange: Generator[Collective, Any, list[Entries] | None] | None = None
    bytes_sent: float = 0.0
    rounds: int = 0
    """Collectives begun in this step."""
    tally: Tally = field(default_factory=Tally)

    @property
    def name(self) -> str:
        return self.layout.name

    def forget(self) -> None:
        """What was seen of the buffer says nothing of it any more."""
        self.absorbed.clear()
        if self.selector is not None:
            self.selector.forget()


class Pipeline:
    """Residuals, selection and reduction for the parameters of one optimizer.

    Args:
        ops: the framework's verbs.
        compressor: settings and algorithm.
        world: number of workers that exchange.
        position: this worker's among them, in [0, world).
        rank: this worker's global rank, for error messages.
        selector_for: gives buckets what selects on their device.
    """

    def __init__(
        self,
        ops: Ops,
        compressor: Compressor,
        *,
        world: int,
        position: int,
        rank: int,
        selector_for: SelectorFor = by_verbs,
    ) -> None:
        self.ops = ops
        self.compressor = compressor
        self.world = world
        self.position = position
        self.rank = rank
        self._selector_for = selector_for
        self.residuals = Residuals(ops)
        self.velocities = Residuals(ops)
        """With momentum correction: of the parameters in buckets, and of those that are reduced dense."""
        self.buckets: list[Bucket] = []
        self.dense_bytes_sent = 0.0
        self._bucket_of: dict[str, Bucket] = {}
        self._offsets: dict[str, int] = {}
        """Of the parameters in their buckets."""
        self._learning_rates: dict[str, float] = {}
        self._not_finite: list[str] = []
        """What held NaN or infinity in this step: this rank's gradients first."""
        self._tasks: list[Task] = []
        """Exchanges of this step that have ended."""

    def add_buckets(self, layouts: Sequence[Layout], like: Callable[[str], Array]) -> None:
        """Add buckets; `like(name)` gives an array on the device where the parameter's bucket shall live."""
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
        """Keep a bucket's residual and velocity in other memory from now on; between two steps."""
        self.residuals.rebind(bucket.name, buffer)
        bucket.buffer, bucket.velocity = buffer, velocity
        if velocity is not None:
            self.velocities.rebind(bucket.name, velocity)

    def add_dense(self, layouts: Sequence[Layout], like: Callable[[str], Array]) -> None:
        """Say which parameters, one each, the adapter reduces dense."""
        for layout in layouts:
            if self.compressor.momentum_correction is not None:
                self.velocities.allocate(layout, like(layout.name))

    def _place(self, layout: Layout) -> Place:
        return Place(layout.name, self.position, self.world)

    # --- gradients in ---

    def arrive(self, name: str, gradient: Array | None, learning_rate: float | None = None) -> Bucket | None:
        """Take in a parameter's gradient (None: it has none in this step); return its bucket when that is complete.

        `learning_rate` is the step's, for `lr_in_residual`. The gradient's memory is free afterwards. NaN and infinity
        are kept out of the residual; their bucket's reduced gradient becomes None on every rank.
        """
        bucket = self._bucket_of[name]
        if name not in bucket.missing:
            raise RuntimeError(f"the gradient of {name!r} arrived twice in one step")
        residual = self.residuals.view(name)
        if self.compressor.lr_in_residual:
            gradient = self._rescaled(name, gradient, residual, learning_rate)
        if gradient is not None:
            gradient = self.clipped(gradient, bucket.layout.residual_dtype)
        if self._absorb(bucket, name, residual, gradient):
            self._not_finite.append(f"parameter {name!r}")
            bucket.finite = False
        bucket.missing.discard(name)
        return None if bucket.missing else bucket

    def _absorb(self, bucket: Bucket, name: str, residual: Array, gradient: Array | None) -> int:
        """Take a gradient (None: zero) into the residual, and into the velocity if there is one.

        How many entries were left out because they are not finite.
        """
        ops, correction = self.ops, self.compressor.momentum_correction
        selector = self._selector(bucket)
        if selector is not None:
            velocity = bucket.velocity if correction is not None else None
            k, offset = self._asked(bucket), self._offsets[name]
            selector.absorb(offset, gradient, bucket.state, k, velocity=velocity, correction=correction)
            # `_learn` is told.
            return 0
        if gradient is None:
            if correction is not None:
                correction.accumulate(ops, residual, self.velocities.view(name), None)
            return 0
        wanted = self._wanted(bucket, name)
        if correction is None:
            absorbed = ops.absorb(residual, gradient, wanted)
        else:
            velocity, how = self.velocities.view(name), (correction.momentum, correction.nesterov)
            absorbed = ops.absorb_velocity(residual, velocity, gradient, *how, wanted)
        bucket.absorbed[name] = absorbed
        return absorbed.not_finite

    def _selector(self, bucket: Bucket) -> Selector | None:
        """What selects in this step, if it is not the host."""
        return None if bucket.state.step < self.compressor.dense_steps else bucket.selector

    def _asked(self, bucket: Bucket) -> int:
        """k of this step."""
        return self.compressor.asked(bucket.layout.numel, self.compressor.ratio_at(bucket.state.step))

    def _wanted(self, bucket: Bucket, name: str) -> Wanted:
        state = bucket.state
        if state.step < self.compressor.dense_steps:
            return NOTHING
        return Wanted(state.cut, min(state.room, bucket.layout.numel // _FEW), self._offsets[name])

    def _select(self, bucket: Bucket, absorbed: list[Absorbed | None], k: int, capacity: int) -> Selection:
        known = join(self.ops, bucket.buffer, absorbed)
        # What was found out takes memory, and the task lives on until the step ends.
        absorbed.clear()
        return self.compressor.select(cast(Ops, known), bucket.buffer, k, capacity, bucket.state)

    def check_reduced(self, name: str, reduced: Array) -> bool:
        """Whether a reduced gradient that did not come through a bucket is finite; if not, the step fails."""
        finite = self.ops.all_finite(reduced)
        if not finite:
            self._not_finite.append(f"parameter {name!r}")
        return finite

    def finish_dense(self, name: str, reduced: Array) -> None:
        """Put momentum into the reduced gradient of a parameter that is reduced dense, in place."""
        correction = self.compressor.momentum_correction
        if self.check_reduced(name, reduced) and correction is not None:
            velocity = self.velocities.view(name)
            corrected = self.ops.copy(velocity)
            corrected[:] = 0
            correction.accumulate(self.ops, corrected, velocity, reduced)
            reduced[...] = corrected.reshape(reduced.shape)

    def clipped(self, gradient: Array, dtype: str) -> Array:
        """This rank's gradient of a parameter, of `dtype` and scaled down if `clip_norm` asks for it."""
        limit = self.compressor.clip_norm
        return gradient if limit is None else feedback.clip(self.ops, gradient, limit, self.world, dtype)

    def _rescaled(
        self, name: str, gradient: Array | None, residual: Array, learning_rate: float | None
    ) -> Array | None:
        """Keep a residual in units of the update; a gradient of a step with rate 0 adds nothing to it."""
        if learning_rate is None:
            raise ValueError("learning_rate must be given with lr_in_residual=True, got None")
        if learning_rate == 0.0:
            return None
        factor = self._learning_rates.get(name, learning_rate) / learning_rate
        if factor != 1.0:
            residual *= factor
        self._learning_rates[name] = learning_rate
        return gradient

    # --- a bucket's exchange ---

    def begin(self, bucket: Bucket) -> Collective:
        """Select from a complete bucket; the first collective of its exchange. What was not selected stays in the residual."""
        compressor, state, numel = self.compressor, bucket.state, bucket.layout.numel
        bucket.missing = {slot.name for slot in bucket.layout.slots}
        absorbed = [bucket.absorbed.pop(slot.name, None) for slot in bucket.layout.slots]
        k, selector = self._asked(bucket), self._selector(bucket)
        capacity = compressor.room(numel, k, self.world)
        correction = compressor.momentum_correction
        exchange = exchanges.dense if state.step < compressor.dense_steps else compressor.exchange
        if selector is not None:
            exchange = exchanges.launched
        bucket.task = Task(
            ops=self.ops,
            bucket=bucket.name,
            buffer=bucket.buffer,
            velocity=bucket.velocity if correction is not None and correction.masking else None,
            capacity=capacity,
            world=self.world,
            rank=self.rank,
            asked=numel if exchange is exchanges.dense else k,
            finite=bucket.finite,
            residual=compressor.residual,
            select=lambda: self._select(bucket, absorbed, k, capacity),
            digest=lambda: state.digest() ^ state.fingerprint,
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
        """Wait for what the selector has done; how many entries are sent, and how many had no room."""
        told = selector.finish(bucket.state, k)
        if told["not_finite"]:
            names = {slot.offset: slot.name for slot in bucket.layout.slots}
            self._not_finite[:0] = [f"parameter {names[offset]!r}" for offset in selector.not_finite()]
        sent, found = int(told["sent"]), int(told["found"])
        room = self.compressor.room(bucket.layout.numel, k, self.world)
        return sent, found - sent if sent == room and found > room else 0

    def advance(
        self,
        bucket: Bucket,
        result: Array,
        divisor: float,
        write: Callable[[Slot, list[Entries] | None], None],
    ) -> Collective | None:
        """Go on with the result of a bucket's collective: the next one, or None at the end.

        At the end every parameter's entries are handed to `write`, rank by rank in rank order, values divided by
        `divisor`; None instead when some rank's gradient was not finite. The order is the same on all ranks, so that sums
        of floats are too, to the last bit.
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
        parts: list[Entries] | None,
        divisor: float,
        write: Callable[[Slot, list[Entries] | None], None],
    ) -> None:
        task, state = bucket.task, bucket.state
        assert task is not None
        bucket.task = bucket.exchange = None
        state.step += 1
        self._tasks.append(task)
        if parts is None:
            self._not_finite.append(f"some parameter in bucket {bucket.name!r} of another rank")
            for slot in bucket.layout.slots:
                write(slot, None)
            return
        bucket.tally.add(
            Counts(task.asked, task.count, task.overflow, state.threshold, state.stages, bucket.bytes_sent)
        )
        by_slot = [self._by_slot(bucket, part, divisor) for part in parts]
        for number, slot in enumerate(bucket.layout.slots):
            write(slot, [part[number] for part in by_slot])

    def _by_slot(self, bucket: Bucket, part: Entries, divisor: float) -> list[Entries]:
        slots, values = bucket.layout.slots, part.values / divisor
        if part.indices is None:
            return [Entries(None, values[slot.offset : slot.offset + slot.numel]) for slot in slots]
        bounds = self.ops.positions(part.indices, [slot.offset for slot in slots] + [bucket.layout.numel])
        if bounds[-1] != len(part.indices):
            raise RuntimeError(
                f"rank {self.rank}: a message for bucket {bucket.name!r} holds an index beyond its {bucket.layout.numel} "
                "entries; the ranks run different models or different versions of horovod_sparse"
            )
        return [
            Entries(part.indices[start:end] - slot.offset, values[start:end])
            for slot, start, end in zip(slots, bounds, bounds[1:], strict=False)
        ]

    def end_step(self) -> None:
        """End a step, when all reduced gradients are there: it succeeds, or fails on every rank.

        It fails if some rank's gradient held NaN or infinity. What every bucket had sent then returns to the residuals, which
        are finite and hold the step's finite gradients too; momentum has moved on. Raises FloatingPointError on every
        rank then, unless `not_finite="propagate"`; training can go on.
        """
        found, self._not_finite = self._not_finite, []
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if found:
                task.fail()
            else:
                task.succeed()
        if found and self.compressor.not_finite == "raise":
            raise FloatingPointError(
                f"rank {self.rank}: the gradient of {found[0]} holds NaN or infinity; it was kept out of the residual. "
                "Lower the learning rate, or with dynamic loss scaling use not_finite='propagate'"
            )

    # --- statistics and state ---

    def stats(self) -> Stats:
        """Counts and bytes per bucket and in total, of the last step and on average; computed now."""
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
        """Residuals and adaptive state by parameter name: arrays, numbers, strings and lists only.

        Every parameter carries a copy of its bucket's adaptive state, so that other buckets can be made of it.
        """
        return {
            "version": VERSION,
            "residuals": self.residuals.state_dict(),
            "velocities": self.velocities.state_dict(),
            "learning_rates": dict(self._learning_rates),
            "adaptive": {name: bucket.state.state_dict() for name, bucket in self._bucket_of.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, on the same model; the buckets may differ. Strict."""
        check_state(state, self.compressor, self.residuals.shapes, self.velocities.shapes)
        self.residuals.load_state_dict(state["residuals"])
        self.velocities.load_state_dict(state["velocities"])
        self._learning_rates = dict(state["learning_rates"])
        for bucket in self.buckets:
            bucket.forget()
            bucket.state.load_state_dict(state["adaptive"][bucket.name])

    def rescale(self, factor: float) -> None:
        """Multiply residuals and velocities by `factor`."""
        self.residuals.rescale(factor)
        self.velocities.rescale(factor)
        for bucket in self.buckets:
            bucket.forget()
            bucket.state.rescale(factor)

    def reset(self) -> None:
        """Start afresh: residuals zero, adaptive state and statistics as before the first step."""
        self.residuals.reset()
        self.velocities.reset()
        self._learning_rates.clear()
        for bucket in self.buckets:
            bucket.forget()
            bucket.state = self.compressor.new_state(self._place(bucket.layout))
            bucket.tally = Tally()


def _some(selector: Selector | None) -> Selector:
    assert selector is not None
    return selector


def check_limits(layouts: Sequence[Layout], compressor: Compressor, world: int) -> None:
    """Raise ValueError when a bucket is too large for its messages."""
    for layout in layouts:
        gathers = compressor.exchange is not exchanges.shared_indices
        most = compressor.most_room(layout.numel, world) if gathers else 0
        wire.check_limits(layout.name, layout.numel, most, world)


def check_parts(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless `state` has the parts that `Pipeline.state_dict` gives it, in this release."""
    if state.get("version") != VERSION:
        raise ValueError(
            f"state must have version {VERSION}, got {state.get('version')!r}; another release, or not a compressor, saved it"
        )
    missing = [part for part in PARTS if part not in state]
    if missing:
        raise ValueError(f"state must have {[*PARTS]}, but {missing} are missing; the state is damaged")


def check_state(
    state: Mapping[str, Any],
    compressor: Compressor,
    residuals: Mapping[str, tuple[int, ...]],
    velocities: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise ValueError unless `state` is one of this release, of parameters of these shapes, and of this algorithm."""
    check_parts(state)
    _check_shapes("residuals", state["residuals"], residuals, "the same min_numel and exclude")
    _check_shapes("velocities", state["velocities"], velocities, "the same momentum_correction")
    if state["adaptive"].keys() != state["residuals"].keys():
        raise ValueError("state['adaptive'] must name the same parameters as state['residuals']; the state is damaged")
    for adaptive in state["adaptive"].values():
        compressor.new_state().load_state_dict(adaptive)


def _check_shapes(what: str, arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], remedy: str) -> None:
    got = {name: tuple(array.shape) for name, array in arrays.items()}
    missing, unexpected = sorted(shapes.keys() - got.keys()), sorted(got.keys() - shapes.keys())
    reshaped = {name: (got[name], shapes[name]) for name in got.keys() & shapes.keys() if got[name] != shapes[name]}
    if missing or unexpected or reshaped:
        raise ValueError(
            f"{what} must be those of this model's compressed parameters; missing: {missing}, "
            f"unexpected: {unexpected}, of another shape (got, expected): {reshaped}; load a state saved with the same "
            f"model and {remedy}"
        )
