"""The path from gradient to reduced gradient by TensorFlow operations alone (`graph=True`).

It is for GPUs, and for where Python calls are not allowed. It selects, sends and reduces the same as the shared CPU path
(`host`). Residuals, adaptive numbers and counts live in variables on the same device as the model's variables. They are copied
to the host only on request.

XLA (`jit_compile=True`) can compile the gradients but not the reduction. Horovod 0.28.1, as `docker/build_horovod.sh` builds
it, has no XLA kernels ("No registered 'HorovodAllgather' OpKernel for XLA_CPU_JIT devices"). So jit a function that computes
gradients, and reduce them in the `tf.function` that calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.compressors.base import BucketState, Compressor, Place
from horovod_sparse.compressors.momentum import clip_limit
from horovod_sparse.core.layout import Layout, Slot
from horovod_sparse.core.pipeline import check_limits
from horovod_sparse.core.state import VERSION, check_state
from horovod_sparse.core.statistics import Counts, Stats, StepStats, Tally
from horovod_sparse.exchange import cost, wire
from horovod_sparse.tensorflow.exchange import Collectives, wire_dtype
from horovod_sparse.tensorflow.graph_engine import selectors
from horovod_sparse.tensorflow.memory import make_variable
from horovod_sparse.tensorflow.step import Step

Tensor = Any
Variable = Any


@dataclass(frozen=True)
class GraphBucket:
    """One bucket on this rank. Everything that changes is held in variables."""

    layout: Layout
    k: int
    capacity: int
    residual: Variable
    velocity: Variable | None
    """With momentum correction; otherwise None."""
    state: BucketState
    """The state before the first step. The variables below hold what changes of it."""
    step: Variable
    saved: Mapping[str, Variable]
    """The algorithm's adaptive numbers, by name."""
    tally: Variable
    """Rows: the last step, the sums over all steps. Columns: steps, count, overflow, threshold."""

    @property
    def name(self) -> str:
        return self.layout.name


@dataclass(frozen=True)
class _Sent:
    """What this rank sends from a bucket in a step."""

    bucket: GraphBucket
    message: Tensor
    indices: Tensor
    taken: Tensor
    """The residual's values at these indices, in the residual's own type."""
    chosen: selectors.Chosen
    finite: Mapping[str, Tensor]
    """By parameter name: whether its gradient was finite on this rank."""


class GraphPipeline:
    """Residuals, selection and reduction for one optimizer; see `Pipeline` for the terms.

    Args:
        compressor: settings and algorithm, checked with `selectors.check`.
        collectives: Horovod's collectives.
        world, position, rank, averages: as for `Pipeline`.
    """

    def __init__(
        self,
        compressor: Compressor,
        collectives: Collectives,
        *,
        world: int,
        position: int,
        rank: int,
        averages: bool = True,
    ) -> None:
        self.compressor = compressor
        self.buckets: list[GraphBucket] = []
        self.dense_bytes_sent = 0.0
        self._collectives = collectives
        self._world = world
        self._position = position
        self._rank = rank
        self._averages = averages
        self._residuals: list[tuple[Layout, Variable]] = []
        self._velocities: list[tuple[Layout, Variable]] = []
        """With momentum correction: velocities of the buckets and of the parameters that are reduced dense."""
        self._dense_velocity: dict[str, Variable] = {}
        self._divisors: dict[float, Variable] = {}

    @property
    def variables(self) -> list[Variable]:
        """The residuals and velocities, each flat."""
        return [variable for _, variable in (*self._residuals, *self._velocities)]

    @property
    def nbytes(self) -> int:
        """Memory that the residuals take, in bytes."""
        return sum(layout.numel * np.dtype(layout.residual_dtype).itemsize for layout, _ in self._residuals)

    def add_buckets(self, layouts: Sequence[Layout], device: Callable[[str], str | None] = lambda name: None) -> None:
        """Add buckets; `device(name)` is the parameter's device, and its bucket is put there."""
        check_limits(layouts, self.compressor, self._world)
        self.buckets.extend(self._make_bucket(layout, device(layout.name)) for layout in layouts)

    def _make_bucket(self, layout: Layout, device: str | None) -> GraphBucket:
        k = self.compressor.asked(layout.numel)
        state = self.compressor.new_state(Place(layout.name, self._position, self._world))

        def number(name: str, value: Any) -> Variable:
            return make_variable(value, f"{layout.name}/{name}", device)

        residual = _make_flat(layout, "residual", device)
        self._residuals.append((layout, residual))
        velocity = None
        if self.compressor.momentum_correction is not None:
            velocity = _make_flat(layout, "velocity", device)
            self._velocities.append((layout, velocity))
        return GraphBucket(
            layout,
            k,
            self.compressor.room(layout.numel, k, self._world),
            residual,
            velocity,
            state,
            step=number("step", np.int64(0)),
            saved={name: number(name, np.float64(getattr(state, name))) for name in state.saved},
            tally=number("tally", np.zeros((2, 4))),
        )

    def add_dense(self, layouts: Sequence[Layout], device: Callable[[str], str | None] = lambda name: None) -> None:
        """Set which parameters are reduced dense; each layout holds one of them."""
        for layout in layouts:
            if self.compressor.momentum_correction is not None:
                velocity = self._dense_velocity[layout.name] = _make_flat(layout, "velocity", device(layout.name))
                self._velocities.append((layout, velocity))

    # --- one step: called while a graph is built ---

    def reduce(self, step: Step) -> dict[str, Tensor]:
        """Build the operations that reduce one step's gradients, and return the reduced gradients by name.

        A step fails on every rank if a gradient on any rank holds NaN or infinity, or overflows its residual. What was
        selected then stays in the residuals, and `tf.errors.InvalidArgumentError` is raised unless `not_finite="propagate"`.

        If an exception ends a step early, every residual is either as before the step or holds the whole gradient.
        Velocities change together with the residuals. Everything else changes only at the end of the step.
        """
        clip = self._clip_factor(step)
        sent = [self._send(step, bucket, clip) for bucket in step.buckets]
        gathered = [
            self._collectives.allgather(one.message, f"{self.buckets.index(one.bucket)}.pairs.0") for one in sent
        ]
        divisor = self._divisor(step.divisor)
        received = [self._receive(one.bucket, all_, divisor) for one, all_ in zip(sent, gathered, strict=True)]
        dense = self._reduce_dense(step, clip)
        others = {name: _all_finite(tensor) for name, tensor in (*dense.items(), *step.others.items())}
        # The labels have no quotation marks, because an assertion would show them with backslashes.
        checks = [(f"parameter {name}", finite) for one in sent for name, finite in one.finite.items()]
        checks += [
            (f"some parameter in bucket {one.bucket.name} of another rank", finite)
            for one, (_, finite) in zip(sent, received, strict=True)
        ]
        checks += [(f"parameter {name}", finite) for name, finite in others.items()]
        succeeded = tf.reduce_all([finite for _, finite in checks]) if checks else tf.constant(True)
        # Run the updates only in a step that has come this far.
        with tf.control_dependencies([succeeded]):
            updates = [
                update
                for one, (_, finite) in zip(sent, received, strict=True)
                for update in self._settle(one, finite, succeeded)
            ]
        for name, velocity in self._dense_velocity.items():
            if name in dense:
                dense[name], update = self._finish_dense(dense[name], velocity, others[name])
                updates.append(update)
        with tf.control_dependencies(updates):
            end = self._verdict(checks, succeeded)
        with tf.control_dependencies([end]):
            reduced = {
                slot.name: tf.cast(_part(flat, slot), step.dtypes[slot.name])
                for one, (flat, _) in zip(sent, received, strict=True)
                for slot in one.bucket.layout.slots
            }
            return reduced | {name: tf.cast(tensor, step.dense[name].dtype) for name, tensor in dense.items()}

    def _divisor(self, number: float) -> Tensor:
        # The divisor is a variable, because TensorFlow multiplies by the reciprocal of a constant, which rounds differently.
        if number not in self._divisors:
            self._divisors[number] = make_variable(np.float32(number), "divisor", None)
        return self._divisors[number].read_value()

    def _send(self, step: Step, bucket: GraphBucket, clip: Tensor | None) -> _Sent:
        x, finite = self._accumulate(step, bucket, clip)
        saved = {name: variable.read_value() for name, variable in bucket.saved.items()}

        def some() -> tuple[Any, ...]:
            chosen = selectors.select(self.compressor, x, bucket.k, bucket.capacity, saved)
            taken = tf.gather(x, chosen.indices)
            message = _pack(chosen.indices, _to_float32(taken), bucket.capacity)
            return message, chosen.indices, taken, chosen.found, chosen.threshold, chosen.saved

        def nothing() -> tuple[Any, ...]:
            none = tf.zeros([0], tf.int64)
            message = _pack(tf.fill([1], tf.constant(wire.NOT_FINITE, tf.int64)), tf.zeros([1]), bucket.capacity)
            zero = tf.constant(0.0, tf.float64)
            return message, none, tf.zeros([0], x.dtype), zero, zero, saved

        message, indices, taken, found, threshold, after = tf.cond(tf.reduce_all(list(finite.values())), some, nothing)
        message = tf.ensure_shape(message, [bucket.capacity, 2])
        return _Sent(bucket, message, indices, taken, selectors.Chosen(indices, found, threshold, after), finite)

    def _accumulate(self, step: Step, bucket: GraphBucket, clip: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients to the residual. Return the new residual and, by parameter, whether all its numbers were finite."""
        dtype, slots = bucket.layout.residual_dtype, bucket.layout.slots
        none = {slot.name: tf.zeros([slot.numel], dtype) for slot in slots}
        given = {
            slot.name: tf.reshape(tf.cast(step.gradients[slot.name], dtype), [slot.numel])
            for slot in slots
            if slot.name in step.gradients
        }
        kept = {name: _only_finite(self._clipped(gradient, clip)) for name, gradient in given.items()}
        flat = tf.concat([kept.get(slot.name, none[slot.name]) for slot in slots], 0)
        residual = _without(bucket.residual.read_value(), slots, step.frozen)
        if bucket.velocity is None:
            x, velocity = residual + flat, None
        else:
            x, velocity = self._with_momentum(
                residual, _without(bucket.velocity.read_value(), slots, step.frozen), flat
            )
        fits = tf.math.is_finite(x)
        finite = {
            slot.name: tf.reduce_all(_range(fits, slot)) & _all_finite(given.get(slot.name, none[slot.name]))
            for slot in slots
        }
        x = _in_range(x)
        updates = [bucket.residual.assign(x)]
        if bucket.velocity is not None:
            # Update the velocity after the residual: if a step stops between the two, the residual has the whole gradient.
            with tf.control_dependencies(updates):
                updates.append(bucket.velocity.assign(_in_range(velocity)))
        with tf.control_dependencies(updates):
            return tf.identity(x), finite

    def _with_momentum(self, residual: Tensor, velocity: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return residual and velocity with the gradient added, as `MomentumCorrection.accumulate` does."""
        correction = self.compressor.momentum_correction
        assert correction is not None
        momentum = tf.cast(correction.momentum, velocity.dtype)
        if correction.nesterov:
            velocity = _plus(velocity, gradient) * momentum
            return _plus(residual, gradient) + velocity, velocity
        velocity = _plus(velocity * momentum, gradient)
        return residual + velocity, velocity

    def _clip_factor(self, step: Step) -> Tensor | None:
        """Return the `momentum.clip_factor` of all this rank's gradients with `clip_scope="model"`, otherwise None."""
        if not self.compressor.holds_back:
            return None
        gradients = [*step.gradients.values(), *step.dense.values()]
        norms = [_finite_norm(tf.cast(gradient, _wide(gradient))) for gradient in gradients]
        return self._factor(_norm(tf.stack([tf.constant(0.0, tf.float64), *norms])))

    def _clipped(self, gradient: Tensor, factor: Tensor | None) -> Tensor:
        """Clip the gradient as `momentum.clip` or `momentum.scaled` does; without a limit, return it unchanged."""
        if self.compressor.clip_norm is None:
            return gradient
        if factor is None:
            factor = self._factor(_finite_norm(gradient))
        return gradient * tf.cast(factor, gradient.dtype)

    def _factor(self, norm: Tensor) -> Tensor:
        assert self.compressor.clip_norm is not None
        limit = clip_limit(self.compressor.clip_norm, self._world, averages=self._averages)
        one = tf.ones_like(norm)
        return tf.where(norm > 0.0, tf.minimum(one, limit / norm), one)

    def _receive(self, bucket: GraphBucket, gathered: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the reduced gradient, flat, and whether all gradients were finite. If not, the reduced one is NaN."""
        numel, dtype = bucket.layout.numel, bucket.layout.residual_dtype
        # Handle the rows as floats, because many operations on int32 run on the host, even between tensors on a GPU.
        rows = tf.bitcast(gathered, tf.float32)
        numbers = tf.bitcast(rows[:, 0], tf.int32)
        # Do not reshape to (world, capacity, 2): TensorFlow's optimizer would move the reshape before the length check.
        with tf.control_dependencies([self._check_length(bucket, gathered), *self._check_indices(bucket, numbers)]):
            numbers = tf.identity(numbers)
        finite = tf.reduce_all(numbers != wire.NOT_FINITE)
        # Padding is added to an extra last entry, so that no shape depends on data.
        indices = tf.cast(tf.where(numbers >= 0, numbers, numel), tf.int64)[:, None]
        values = tf.cast(rows[:, 1] / divisor, dtype)
        flat = tf.zeros([numel + 1], dtype)
        for start in range(0, self._world * bucket.capacity, bucket.capacity):
            part = slice(start, start + bucket.capacity)
            flat = tf.tensor_scatter_nd_add(flat, indices[part], values[part])
        return tf.where(finite, flat[:numel], tf.constant(math.nan, dtype)), finite

    def _check_length(self, bucket: GraphBucket, gathered: Tensor) -> Any:
        expected = self._world * bucket.capacity
        return tf.debugging.Assert(
            tf.equal(tf.shape(gathered)[0], expected),
            [
                f"rank {self._rank}: the messages for bucket {bucket.name} must have {expected} rows together; the ranks "
                "run different models, settings or versions of horovod_sparse; got",
                tf.shape(gathered)[0],
            ],
        )

    def _check_indices(self, bucket: GraphBucket, numbers: Tensor) -> list[Any]:
        """Assert that each worker's indices pass `wire.flaw`, or that its first row says its gradient is not finite."""
        checks = []
        for sender in range(self._world):
            part = numbers[sender * bucket.capacity : (sender + 1) * bucket.capacity]
            before, after = part[:-1], part[1:]
            follows = tf.reduce_all((after == wire.PADDING) | ((before >= 0) & (after > before)))
            in_range = tf.reduce_all(part < bucket.layout.numel) & tf.reduce_all(part[:1] >= wire.PADDING)
            not_finite = tf.reduce_any(part[:1] == wire.NOT_FINITE)
            message = (
                f"rank {self._rank}: the message of worker {sender} for bucket {bucket.name} is damaged: expected indices that "
                f"ascend within [0, {bucket.layout.numel}), then padding (-1). The ranks run different models or different "
                "versions of horovod_sparse; got"
            )
            checks.append(tf.debugging.Assert(not_finite | (follows & in_range), [message, part]))
        return checks

    def _settle(self, sent: _Sent, received: Tensor, succeeded: Tensor) -> list[Any]:
        """Update a bucket's variables at the end of a step; `received` is whether all its messages were finite."""
        bucket, indices = sent.bucket, sent.indices
        updates = [bucket.step.assign_add(1)]
        if self.compressor.residual:
            left = sent.taken - tf.cast(_to_float32(sent.taken), sent.taken.dtype)
            updates.append(_write(bucket.residual, indices, tf.where(succeeded, left, sent.taken)))
        else:
            updates.append(bucket.residual.assign(tf.zeros_like(bucket.residual)))
        correction = self.compressor.momentum_correction
        if bucket.velocity is not None and correction is not None and correction.masking:
            moving = bucket.velocity.sparse_read(indices)
            updates.append(_write(bucket.velocity, indices, tf.where(succeeded, tf.zeros_like(moving), moving)))
        updates += [bucket.saved[name].assign(number) for name, number in sent.chosen.saved.items()]
        return [*updates, self._count(sent, received)]

    def _count(self, sent: _Sent, received: Tensor) -> Any:
        count = tf.cast(tf.size(sent.indices), tf.float64)
        last = tf.stack([tf.ones_like(count), count, sent.chosen.found - count, sent.chosen.threshold])
        before = sent.bucket.tally.read_value()
        return sent.bucket.tally.assign(tf.where(received, tf.stack([last, before[1] + last]), before))

    def _reduce_dense(self, step: Step, clip: Tensor | None) -> dict[str, Tensor]:
        reduced: dict[str, Tensor] = {}
        for number, pack in enumerate(step.packs()):
            gradients = [step.dense[name] for name in pack.names]
            if self.compressor.clip_norm is not None:
                gradients = [self._clipped(tf.cast(gradient, _wide(gradient)), clip) for gradient in gradients]
            message = tf.cast(pack.join(gradients), wire_dtype(pack.dtype))
            reduced |= pack.split(self._collectives.dense(message, f"dense.{number}", step.op, step.predivide))
        return reduced

    def _finish_dense(self, reduced: Tensor, velocity: Variable, finite: Tensor) -> tuple[Tensor, Any]:
        """Return a dense gradient with momentum and the update of its velocity; if not finite, both stay as they were."""
        before, flat = velocity.read_value(), tf.reshape(reduced, [-1])
        total, after = self._with_momentum(tf.zeros_like(before), before, flat)
        corrected = tf.cast(tf.reshape(total, reduced.shape), reduced.dtype)
        return tf.where(finite, corrected, reduced), velocity.assign(tf.where(finite, after, before))

    def _verdict(self, checks: Sequence[tuple[str, Tensor]], succeeded: Tensor) -> Any:
        if self.compressor.not_finite == "propagate" or not checks:
            return tf.no_op()
        first = tf.argmin(tf.cast(tf.stack([finite for _, finite in checks]), tf.int32))
        cause = tf.gather(tf.constant([label for label, _ in checks]), first)
        return tf.debugging.Assert(
            succeeded,
            [
                tf.strings.join(
                    [
                        f"rank {self._rank}: the gradient of ",
                        cause,
                        " holds NaN or infinity, or overflows its residual; it was kept out of the residual. Lower the "
                        "learning rate, or with loss scaling set not_finite to propagate",
                    ]
                )
            ],
        )

    # --- statistics and state: the same as those of `Pipeline` ---

    def adopt_memory(self) -> None:
        """Do nothing: the graph reads its variables anew in every step."""

    def stats(self) -> Stats:
        """Compute counts and bytes per bucket and in total, for the last step and on average."""
        pairs, most = [], 0
        for bucket in self.buckets:
            tally = self._tally(bucket)
            most = max(most, tally.steps)
            residual = _numpy(bucket.residual).astype(np.float64)
            pairs.append(tally.stats(bucket.name, bucket.layout.numel, float(np.linalg.norm(residual))))
        return Stats(
            most,
            StepStats(tuple(last for last, _ in pairs), self.dense_bytes_sent),
            StepStats(tuple(mean for _, mean in pairs), self.dense_bytes_sent),
        )

    def _tally(self, bucket: GraphBucket) -> Tally:
        stages = getattr(self.compressor, "stages", 0)
        sent = cost.allgather_bytes(8 * bucket.capacity, self._world)
        last, sums = (
            Counts(steps * bucket.k, count, overflow, threshold, steps * stages, steps * sent)
            for steps, count, overflow, threshold in _numpy(bucket.tally).tolist()
        )
        return Tally(int(_numpy(bucket.tally)[1, 0]), last, sums)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `Pipeline` does: NumPy arrays and plain values by parameter name."""
        return {
            "version": VERSION,
            "residuals": _arrays(self._residuals),
            "velocities": _arrays(self._velocities),
            "learning_rates": {},
            "adaptive": {slot.name: self._adaptive(bucket) for bucket in self.buckets for slot in bucket.layout.slots},
        }

    def _adaptive(self, bucket: GraphBucket) -> dict[str, object]:
        before: dict[str, Any] = bucket.state.state_dict()
        changed = {"step": bucket.step, **bucket.saved}
        return before | {name: type(before[name])(_numpy(variable)) for name, variable in changed.items()}

    def _state(self, bucket: GraphBucket, adaptive: Mapping[str, Any]) -> BucketState:
        """Make a state from the adaptive numbers that `_adaptive`, or a pipeline on the host, returned."""
        state = self.compressor.new_state(bucket.state.place)
        state.load_state_dict(adaptive)
        return state

    def _adapt(self, bucket: GraphBucket, state: BucketState) -> None:
        """Continue from a state."""
        for name, variable in {"step": bucket.step, **bucket.saved}.items():
            _assign(variable, getattr(state, name))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, here or in `Pipeline`. The state must match strictly."""
        check_state(state, self.compressor, _shapes(self._residuals), _shapes(self._velocities))
        _load(self._residuals, state["residuals"])
        _load(self._velocities, state["velocities"])
        for bucket in self.buckets:
            self._adapt(bucket, self._state(bucket, state["adaptive"][bucket.name]))

    def rescale(self, factor: float) -> None:
        """Multiply residuals and velocities by `factor`."""
        for variable in self.variables:
            _assign(variable, _numpy(variable) * np.asarray(factor, variable.dtype.as_numpy_dtype))
        for bucket in self.buckets:
            state = self._state(bucket, self._adaptive(bucket))
            state.rescale(factor)
            self._adapt(bucket, state)

    def reset(self) -> None:
        """Start afresh: residuals and velocities are zero, adaptive state and statistics as before the first step."""
        for variable in self.variables:
            _assign(variable, np.zeros(variable.shape))
        for bucket in self.buckets:
            _assign(bucket.tally, np.zeros((2, 4)))
            self._adapt(bucket, bucket.state)


# --- tensors ---


def _all_finite(tensor: Tensor) -> Tensor:
    return tf.reduce_all(tf.math.is_finite(tensor))


def _only_finite(tensor: Tensor) -> Tensor:
    """Return the tensor with zeros in place of NaN and infinity."""
    return tf.where(tf.math.is_finite(tensor), tensor, tf.zeros_like(tensor))


def _in_range(sums: Tensor) -> Tensor:
    """Limit sums that have overflowed to the largest number of their type."""
    return tf.clip_by_value(sums, sums.dtype.min, sums.dtype.max)


def _wide(gradient: Tensor) -> Any:
    """Return the type in which a gradient is clipped."""
    return tf.float64 if gradient.dtype == tf.float64 else tf.float32


def _norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm as float64. Float64 entries are scaled, since their squares may leave its range."""
    wide = tf.cast(tensor, tf.float64)
    largest = tf.reduce_max(tf.abs(wide)) if tensor.dtype == tf.float64 else tf.constant(1.0, tf.float64)
    unit = tf.where(largest > 0.0, largest, tf.ones_like(largest))
    return unit * tf.sqrt(tf.reduce_sum(tf.square(wide / unit)))


def _finite_norm(gradient: Tensor) -> Tensor:
    """Return the norm of the finite entries."""
    return _norm(_only_finite(gradient))


def _plus(sum_: Tensor, gradient: Tensor) -> Tensor:
    """Return the sum in the first one's type. Add in the wider type, because a dense gradient keeps its own type."""
    wide = tf.float64 if tf.float64 in (sum_.dtype, gradient.dtype) else tf.float32
    return tf.cast(tf.cast(sum_, wide) + tf.cast(gradient, wide), sum_.dtype)


def _to_float32(values: Tensor) -> Tensor:
    if values.dtype == tf.float32:
        return values
    return tf.cast(tf.clip_by_value(values, -wire.LARGEST, wire.LARGEST), tf.float32)


def _pack(indices: Tensor, values: Tensor, capacity: int) -> Tensor:
    """Return the message of pairs that `wire` defines: int32, shape (capacity, 2)."""
    room = [[0, capacity - tf.size(indices)]]
    rows = tf.cast(tf.pad(indices, room, constant_values=wire.PADDING), tf.int32)
    # Stack as floats, for the reason given in `_receive`.
    return tf.bitcast(tf.stack([tf.bitcast(rows, tf.float32), tf.pad(values, room)], axis=1), tf.int32)


def _range(flat: Tensor, slot: Slot) -> Tensor:
    return flat[slot.offset : slot.offset + slot.numel]


def _part(flat: Tensor, slot: Slot) -> Tensor:
    return tf.reshape(_range(flat, slot), slot.shape)


def _without(flat: Tensor, slots: Sequence[Slot], names: Collection[str]) -> Tensor:
    """Return the flat tensor with zeros in the slots that have these names."""
    if not any(slot.name in names for slot in slots):
        return flat
    parts = [_range(flat, slot) for slot in slots]
    return tf.concat([tf.zeros_like(p) if s.name in names else p for s, p in zip(slots, parts, strict=True)], 0)


# --- variables ---


def _make_flat(layout: Layout, kind: str, device: str | None) -> Variable:
    return make_variable(np.zeros(layout.numel, layout.residual_dtype), f"{layout.name}/{kind}", device)


def _write(variable: Variable, indices: Tensor, values: Tensor) -> Any:
    return variable.scatter_update(tf.IndexedSlices(values, indices))


def _numpy(variable: Variable) -> Any:
    with tf.init_scope():
        return np.array(variable.numpy())


def _assign(variable: Variable, value: Any) -> None:
    with tf.init_scope():
        variable.assign(tf.constant(value, variable.dtype))


def _shapes(kept: Sequence[tuple[Layout, Variable]]) -> dict[str, tuple[int, ...]]:
    return {slot.name: slot.shape for layout, _ in kept for slot in layout.slots}


def _arrays(kept: Sequence[tuple[Layout, Variable]]) -> dict[str, Any]:
    return {
        slot.name: flat[slot.offset : slot.offset + slot.numel].reshape(slot.shape)
        for layout, flat in ((layout, _numpy(variable)) for layout, variable in kept)
        for slot in layout.slots
    }


def _load(kept: Sequence[tuple[Layout, Variable]], arrays: Mapping[str, Any]) -> None:
    for layout, variable in kept:
        parts = [np.asarray(arrays[slot.name]).reshape(-1) for slot in layout.slots]
        _assign(variable, np.concatenate(parts).astype(layout.residual_dtype))
