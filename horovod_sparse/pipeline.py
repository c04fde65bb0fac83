"""The data's way, once for every framework: gradient -> residual -> selection -> message, and messages -> reduced gradient.

A `Pipeline` belongs to one optimizer. The adapter tells it which gradients have arrived, exchanges the messages, and hands
in the memory that the reduced gradients are written to. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from horovod_sparse import wire
from horovod_sparse.buckets import Layout, Slot
from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.cost import allgather_bytes
from horovod_sparse.ops import Array, Ops
from horovod_sparse.residuals import Residuals
from horovod_sparse.statistics import Counts, Stats, StepStats, Tally


class Entries(NamedTuple):
    """One rank's entries for one parameter, relative to the parameter."""

    indices: Array
    values: Array


@dataclass
class Bucket:
    """The state of one bucket on this rank."""

    layout: Layout
    buffer: Array
    """Residual plus the gradients that have arrived in this step."""
    state: BucketState
    missing: set[str] = field(default_factory=set)
    """Parameters whose gradient has not arrived in this step."""
    finite: bool = True
    """Whether all gradients of this step are."""
    tally: Tally = field(default_factory=Tally)

    @property
    def name(self) -> str:
        return self.layout.name


class Pipeline:
    """Residuals, selection and reduction for the parameters of one optimizer.

    Args:
        ops: the framework's verbs.
        compressor: settings and algorithm.
        world: number of workers that exchange.
        position: this worker's among them, in [0, world).
        rank: this worker's global rank, for error messages.
    """

    def __init__(self, ops: Ops, compressor: Compressor, *, world: int, position: int, rank: int) -> None:
        self.ops = ops
        self.compressor = compressor
        self.world = world
        self.position = position
        self.rank = rank
        self.residuals = Residuals(ops)
        self.buckets: list[Bucket] = []
        self.dense_bytes_sent = 0.0
        self._bucket_of: dict[str, Bucket] = {}

    def add_buckets(self, layouts: Sequence[Layout], like: Callable[[str], Array]) -> None:
        """Add buckets; `like(name)` gives an array on the device where the parameter's bucket shall live."""
        for layout in layouts:
            wire.check_limits(layout.name, layout.numel, self.compressor.room(layout.numel), self.world)
        for layout in layouts:
            buffer = self.residuals.allocate(layout, like(layout.name))
            bucket = Bucket(layout, buffer, self.compressor.new_state(), {slot.name for slot in layout.slots})
            self.buckets.append(bucket)
            self._bucket_of.update((slot.name, bucket) for slot in layout.slots)

    def arrive(self, name: str, gradient: Array | None) -> Bucket | None:
        """Take in a parameter's gradient (None: it has none in this step); return its bucket when that is complete.

        The gradient's memory is free afterwards. Raises FloatingPointError for NaN or infinity with
        `not_finite="raise"`: that gradient is kept out of the residual, but the step cannot be finished, and this
        process should end.
        """
        bucket = self._bucket_of[name]
        if name not in bucket.missing:
            raise RuntimeError(f"the gradient of {name!r} arrived twice in one step")
        if gradient is not None and not self.ops.all_finite(gradient):
            if self.compressor.not_finite == "raise":
                raise not_finite_error(self.rank, name)
            bucket.finite = False
            gradient = None
        if gradient is not None:
            self.ops.accumulate(self.residuals.view(name), gradient)
        bucket.missing.discard(name)
        return None if bucket.missing else bucket

    def message(self, bucket: Bucket) -> Array:
        """Select from a complete bucket and pack what was selected; what was not stays in the residual."""
        bucket.missing = {slot.name for slot in bucket.layout.slots}
        numel = bucket.layout.numel
        asked, capacity = self.compressor.asked(numel), self.compressor.room(numel)
        if not bucket.finite:
            bucket.finite = True
            if not self.compressor.residual:
                bucket.buffer[:] = 0
            return self.ops.pack_not_finite(bucket.buffer, capacity)
        state = bucket.state
        selection = self.compressor.select(self.ops, bucket.buffer, asked, capacity, state)
        values = self.ops.take(bucket.buffer, selection.indices)
        if not self.compressor.residual:
            bucket.buffer[:] = 0
        count = len(selection.indices)
        bucket.tally.add(
            Counts(
                asked,
                count,
                selection.found - count,
                state.threshold,
                state.stages,
                allgather_bytes(capacity, self.world),
            )
        )
        return self.ops.pack(selection.indices, values, capacity)

    def reduce(
        self, bucket: Bucket, gathered: Array, divisor: float, write: Callable[[Slot, list[Entries] | None], None]
    ) -> None:
        """Hand every parameter's entries to `write`, rank by rank in rank order, values divided by `divisor`.

        `write` gets None instead when some rank's gradient was not finite; what this rank sent then returns to its
        residual. The order is the same on all ranks, so that sums of floats are too, to the last bit.
        """
        messages = self.ops.split(gathered, self.world)
        if any(self.ops.is_not_finite(message) for message in messages):
            if self.compressor.residual:
                self.ops.scatter_add(bucket.buffer, *self.ops.unpack(messages[self.position]))
            for slot in bucket.layout.slots:
                write(slot, None)
            return
        parts = [self._by_slot(bucket, message, divisor) for message in messages]
        for number, slot in enumerate(bucket.layout.slots):
            write(slot, [part[number] for part in parts])

    def _by_slot(self, bucket: Bucket, message: Array, divisor: float) -> list[Entries]:
        indices, values = self.ops.unpack(message)
        slots = bucket.layout.slots
        bounds = self.ops.positions(indices, [slot.offset for slot in slots] + [bucket.layout.numel])
        if bounds[-1] != len(indices):
            raise RuntimeError(
                f"rank {self.rank}: a message for bucket {bucket.name!r} holds an index beyond its {bucket.layout.numel} "
                "entries; the ranks run different models or different versions of horovod_sparse"
            )
        values = values / divisor
        return [
            Entries(indices[start:end] - slot.offset, values[start:end])
            for slot, start, end in zip(slots, bounds, bounds[1:], strict=False)
        ]

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
            "version": 1,
            "residuals": self.residuals.state_dict(),
            "adaptive": {name: bucket.state.state_dict() for name, bucket in self._bucket_of.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, on the same model; the buckets may differ. Strict."""
        check_state(state, self.compressor, self.residuals.shapes)
        self.residuals.load_state_dict(state["residuals"])
        for bucket in self.buckets:
            bucket.state.load_state_dict(state["adaptive"][bucket.name])

    def reset(self) -> None:
        """Start afresh: residuals zero, adaptive state and statistics as before the first step."""
        self.residuals.reset()
        for bucket in self.buckets:
            bucket.state = self.compressor.new_state()
            bucket.tally = Tally()


def not_finite_error(rank: int, name: str) -> FloatingPointError:
    """What is raised for a gradient with NaN or infinity."""
    return FloatingPointError(
        f"rank {rank}: the gradient of parameter {name!r} holds NaN or infinity; it was kept out of the residual. "
        "Lower the learning rate, or with torch.amp.GradScaler use not_finite='propagate'"
    )


def check_state(state: Mapping[str, Any], compressor: Compressor, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless `state` is one of this release, of these parameters, and of this algorithm."""
    if state.get("version") != 1:
        raise ValueError(f"state must have version 1, got {state.get('version')!r}; it was saved by another release")
    got = {name: tuple(residual.shape) for name, residual in state["residuals"].items()}
    missing, unexpected = sorted(shapes.keys() - got.keys()), sorted(got.keys() - shapes.keys())
    reshaped = {name: (got[name], shapes[name]) for name in got.keys() & shapes.keys() if got[name] != shapes[name]}
    if missing or unexpected or reshaped:
        raise ValueError(
            f"residuals must be those of this model's compressed parameters; missing: {missing}, "
            f"unexpected: {unexpected}, of another shape (got, expected): {reshaped}; load a state saved with the same "
            "model and the same min_numel"
        )
    if state["adaptive"].keys() != got.keys():
        raise ValueError("state['adaptive'] must name the same parameters as state['residuals']; the state is damaged")
    for adaptive in state["adaptive"].values():
        compressor.new_state().load_state_dict(adaptive)
