"""EXPERIMENTAL: the path from gradient to reduced gradient by TensorFlow operations alone (`graph=True`).

It is for GPUs, and for where Python calls are not allowed. It selects, sends and reduces the same as the shared CPU path
(`host`). Residuals, adaptive numbers and counts live in variables on the same device as the model's variables. They are copied
to the host only on request.

XLA (`jit_compile=True`) can compile the gradients but not the reduction. Horovod 0.28.1, as `docker/build_horovod.sh` builds
it, has no XLA kernels ("No registered 'HorovodAllgather' OpKernel for XLA_CPU_JIT devices"). So jit a function that computes
gradients, and reduce them in the `tf.function` that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.compressors.base import Compressor, Place
from horovod_sparse.core.layout import Layout, check_limits
from horovod_sparse.core.state import VERSION, check_state
from horovod_sparse.core.statistics import Stats, Tallied, combined
from horovod_sparse.exchange import wire
from horovod_sparse.exchange.rounds import Way
from horovod_sparse.tensorflow.exchange import Collectives, wire_dtype
from horovod_sparse.tensorflow.graph_engine import selectors
from horovod_sparse.tensorflow.graph_engine.bucket import GraphBucket, arrays, assign, load, make_flat, numpy, shapes
from horovod_sparse.tensorflow.graph_engine.messages import pack, receive
from horovod_sparse.tensorflow.graph_engine.tensors import (
    Clip,
    all_finite,
    in_range,
    only_finite,
    piece,
    to_float32,
    with_momentum,
    without,
)
from horovod_sparse.tensorflow.memory import make_variable
from horovod_sparse.tensorflow.step import Step

Tensor = Any
Variable = Any


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


@dataclass(frozen=True)
class _Moved:
    """A dense gradient with momentum."""

    reduced: Tensor
    velocity: Tensor
    finite: Tensor
    """Whether the gradient and what it became are finite."""


class GraphPipeline:
    """Residuals, selection and reduction for one optimizer; see `Pipeline` for the terms.

    Args:
        compressor: settings and algorithm, checked with `selectors.check`.
        collectives: Horovod's collectives.
        world, position, rank, averages, groups: as for `Pipeline`.
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
        groups: Sequence[str] = (),
    ) -> None:
        self.compressor = compressor
        self.buckets: list[GraphBucket] = []
        self.dense_bytes_sent = 0.0
        self._collectives = collectives
        self._world = world
        self._position = position
        self._rank = rank
        self._clip = Clip(compressor, world, averages=averages)
        self._residuals: list[tuple[Layout, Variable]] = []
        self._velocities: list[tuple[Layout, Variable]] = []
        """With momentum correction: velocities of the buckets and of the parameters that are reduced dense."""
        self._dense_velocity: dict[str, Variable] = {}
        # The divisor is a variable, because TensorFlow multiplies by the reciprocal of a constant, which rounds differently.
        self._divisor = make_variable(np.float32(world if averages else 1.0), "divisor", None)

    check = staticmethod(selectors.check)
    chosen = staticmethod(selectors.chosen)

    @staticmethod
    def check_mode() -> None:
        """Accept functions that are called eagerly: operations are the same there."""

    @staticmethod
    def device_of(device: str) -> str:
        """Return the variable's own device."""
        return device

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
        k = self.compressor.target_count(layout.numel)
        state = self.compressor.new_state(Place(layout.name, self._position, self._world))

        def number(name: str, value: Any) -> Variable:
            return make_variable(value, f"{layout.name}/{name}", device)

        residual = make_flat(layout, "residual", device)
        self._residuals.append((layout, residual))
        velocity = None
        if self.compressor.momentum_correction is not None:
            velocity = make_flat(layout, "velocity", device)
            self._velocities.append((layout, velocity))
        return GraphBucket(
            layout,
            k,
            self.compressor.message_capacity(layout.numel, k, self._world),
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
                velocity = self._dense_velocity[layout.name] = make_flat(layout, "velocity", device(layout.name))
                self._velocities.append((layout, velocity))

    # --- one step: called while a graph is built ---

    def reduce(self, step: Step) -> dict[str, Tensor]:
        """Build the operations that reduce one step's gradients, and return the reduced gradients by name.

        A step fails on every rank if a gradient on any rank holds NaN or infinity, or overflows its residual. What was
        selected then stays in the residuals, and `tf.errors.InvalidArgumentError` is raised unless `not_finite="propagate"`.

        If an exception ends a step early, every residual is either as before the step or holds the whole gradient.
        Velocities change together with the residuals. Everything else changes only at the end of the step.
        """
        factor = self._clip.factor(step)
        sent = [self._send(step, bucket, factor) for bucket in self.buckets if bucket.layout in step.buckets]
        gathered = [self._collectives.allgather(one.message, f"{self.buckets.index(one.bucket)}.0") for one in sent]
        divisor = self._divisor.read_value()
        received = [
            receive(one.bucket, all_, divisor, world=self._world, rank=self._rank)
            for one, all_ in zip(sent, gathered, strict=True)
        ]
        dense = self._reduce_dense(step, factor)
        velocities = {name: one for name, one in self._dense_velocity.items() if name in dense}
        moved = {name: self._with_momentum(dense[name], velocity) for name, velocity in velocities.items()}
        dense |= {name: one.reduced for name, one in moved.items()}
        others = {name: all_finite(tensor) for name, tensor in (*dense.items(), *step.others.items())}
        others |= {name: one.finite for name, one in moved.items()}
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
            updates += [self._dense_velocity[name].assign(one.velocity) for name, one in moved.items()]
        with tf.control_dependencies(updates):
            end = self._verdict(checks, succeeded)
        with tf.control_dependencies([end]):
            reduced = {
                slot.name: tf.cast(tf.reshape(piece(flat, slot), slot.shape), step.dtypes[slot.name])
                for one, (flat, _) in zip(sent, received, strict=True)
                for slot in one.bucket.layout.slots
            }
            return reduced | {name: tf.cast(tensor, step.dense[name].dtype) for name, tensor in dense.items()}

    def _send(self, step: Step, bucket: GraphBucket, factor: Tensor | None) -> _Sent:
        x, finite = self._accumulate(step, bucket, factor)
        saved = {name: variable.read_value() for name, variable in bucket.saved.items()}

        def some() -> tuple[Any, ...]:
            chosen = selectors.select(self.compressor, x, bucket.k, bucket.capacity, saved)
            taken = tf.gather(x, chosen.indices)
            message = pack(chosen.indices, to_float32(taken), bucket.capacity)
            return message, chosen.indices, taken, chosen.found, chosen.threshold, chosen.saved

        def nothing() -> tuple[Any, ...]:
            none = tf.zeros([0], tf.int64)
            message = pack(tf.fill([1], tf.constant(wire.NOT_FINITE, tf.int64)), tf.zeros([1]), bucket.capacity)
            zero = tf.constant(0.0, tf.float64)
            return message, none, tf.zeros([0], x.dtype), zero, zero, saved

        message, indices, taken, found, threshold, after = tf.cond(tf.reduce_all(list(finite.values())), some, nothing)
        message = tf.ensure_shape(message, [bucket.capacity, 2])
        return _Sent(bucket, message, indices, taken, selectors.Chosen(indices, found, threshold, after), finite)

    def _accumulate(self, step: Step, bucket: GraphBucket, factor: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients to the residual. Return the new residual and, by parameter, whether all its numbers were finite."""
        dtype, slots = bucket.layout.residual_dtype, bucket.layout.slots
        none = {slot.name: tf.zeros([slot.numel], dtype) for slot in slots}
        given = {
            slot.name: tf.reshape(tf.cast(step.gradients[slot.name], dtype), [slot.numel])
            for slot in slots
            if slot.name in step.gradients
        }
        kept = {name: only_finite(self._clip.clipped(gradient, factor)) for name, gradient in given.items()}
        flat = tf.concat([kept.get(slot.name, none[slot.name]) for slot in slots], 0)
        residual = without(bucket.residual.read_value(), slots, step.frozen)
        correction = self.compressor.momentum_correction
        if correction is None or bucket.velocity is None:
            x, velocity = residual + flat, None
        else:
            x, velocity = with_momentum(
                correction, residual, without(bucket.velocity.read_value(), slots, step.frozen), flat
            )
        fits = tf.math.is_finite(x)
        finite = {
            slot.name: tf.reduce_all(piece(fits, slot)) & all_finite(given.get(slot.name, none[slot.name]))
            for slot in slots
        }
        x = in_range(x)
        updates = [bucket.residual.assign(x)]
        if bucket.velocity is not None:
            # Update the velocity after the residual: if a step stops between the two, the residual has the whole gradient.
            with tf.control_dependencies(updates):
                updates.append(bucket.velocity.assign(in_range(velocity)))
        with tf.control_dependencies(updates):
            return tf.identity(x), finite

    def _settle(self, sent: _Sent, received: Tensor, succeeded: Tensor) -> list[Any]:
        """Update a bucket's variables at the end of a step; `received` is whether all its messages were finite."""
        bucket, indices = sent.bucket, sent.indices
        updates = [bucket.step.assign_add(1)]
        if self.compressor.residual:
            left = sent.taken - tf.cast(to_float32(sent.taken), sent.taken.dtype)
            updates.append(
                bucket.residual.scatter_update(tf.IndexedSlices(tf.where(succeeded, left, sent.taken), indices))
            )
        else:
            updates.append(bucket.residual.assign(tf.zeros_like(bucket.residual)))
        correction = self.compressor.momentum_correction
        if bucket.velocity is not None and correction is not None and correction.masking:
            moving = bucket.velocity.sparse_read(indices)
            stopped = tf.where(succeeded, tf.zeros_like(moving), moving)
            updates.append(bucket.velocity.scatter_update(tf.IndexedSlices(stopped, indices)))
        updates += [bucket.saved[name].assign(number) for name, number in sent.chosen.saved.items()]
        return [*updates, self._count(sent, received)]

    def _count(self, sent: _Sent, received: Tensor) -> Any:
        count = tf.cast(tf.size(sent.indices), tf.float64)
        last = tf.stack([tf.ones_like(count), count, sent.chosen.found - count, sent.chosen.threshold])
        before = sent.bucket.tally.read_value()
        return sent.bucket.tally.assign(tf.where(received, tf.stack([last, before[1] + last]), before))

    def _reduce_dense(self, step: Step, factor: Tensor | None) -> dict[str, Tensor]:
        reduced: dict[str, Tensor] = {}
        for number, together in enumerate(step.packs()):
            gradients = [self._clip.clipped(step.dense[name], factor) for name in together.names]
            message = tf.cast(together.join(gradients), wire_dtype(together.dtype))
            reduced |= together.split(self._collectives.dense(message, f"dense.{number}", step.op, step.predivide))
        return reduced

    def _with_momentum(self, reduced: Tensor, velocity: Variable) -> _Moved:
        """Apply momentum to a dense gradient. If the gradient is not finite, it and its velocity stay as they were."""
        correction = self.compressor.momentum_correction
        assert correction is not None
        before = velocity.read_value()
        flat = tf.cast(tf.reshape(reduced, [-1]), before.dtype)
        total, after = with_momentum(correction, tf.zeros_like(before), before, flat)
        finite = all_finite(flat)
        corrected = tf.cast(tf.reshape(in_range(total), reduced.shape), reduced.dtype)
        return _Moved(
            tf.where(finite, corrected, reduced), tf.where(finite, in_range(after), before), finite & all_finite(total)
        )

    def _verdict(self, checks: Sequence[tuple[str, Tensor]], succeeded: Tensor) -> Any:
        if self.compressor.not_finite == "propagate" or not checks:
            return tf.no_op()
        first = tf.argmin(tf.cast(tf.stack([finite for _, finite in checks]), tf.int32))
        cause = tf.gather(tf.constant([label for label, _ in checks]), first)
        before, after = (
            f"rank {self._rank}: the gradient of ",
            " holds NaN or infinity, or overflows its residual; it was kept out of the residual. Lower the learning rate, or "
            "with loss scaling set not_finite to propagate",
        )
        return tf.debugging.Assert(succeeded, [tf.strings.join([before, cause, after])])

    # --- statistics and state: the same as those of `Pipeline` ---

    def adopt_memory(self) -> None:
        """Do nothing: the graph reads its variables anew in every step."""

    def discard_step(self) -> None:
        """Raise RuntimeError: the graph keeps no copy of what was before a step."""
        raise RuntimeError("graph must be False in the compression to discard a step, and discardable True")

    @property
    def steps(self) -> int:
        """Number of steps in `stats`."""
        return max((bucket.steps for bucket in self.buckets), default=0)

    def stats(self) -> Stats:
        """Compute counts and bytes per bucket and in total, for the last step and on average."""
        stages = getattr(self.compressor, "stages", 0)
        title = Way(self.compressor.exchange).title
        buckets = [
            Tallied(one.name, one.layout.numel, title, one.totals(stages, self._world), one.residual_norm())
            for one in self.buckets
        ]
        return combined(buckets, self.dense_bytes_sent)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `Pipeline` does: NumPy arrays and plain values by parameter name."""
        return {
            "version": VERSION,
            "residuals": arrays(self._residuals),
            "velocities": arrays(self._velocities),
            "learning_rates": {},
            "adaptive": {slot.name: bucket.adaptive() for bucket in self.buckets for slot in bucket.layout.slots},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, here or in `Pipeline`. The state must match strictly."""
        check_state(state, self.compressor, shapes(self._residuals), shapes(self._velocities))
        load(self._residuals, state["residuals"])
        load(self._velocities, state["velocities"])
        for bucket in self.buckets:
            bucket.adapt(bucket.state_from(state["adaptive"][bucket.name]))

    def rescale(self, factor: float) -> None:
        """Multiply residuals and velocities by `factor`."""
        for variable in self.variables:
            assign(variable, numpy(variable) * np.asarray(factor, variable.dtype.as_numpy_dtype))
        for bucket in self.buckets:
            state = bucket.state_from(bucket.adaptive())
            state.rescale(factor)
            bucket.adapt(state)

    def reset(self) -> None:
        """Start afresh: residuals and velocities are zero, adaptive state and statistics as before the first step."""
        for variable in self.variables:
            assign(variable, np.zeros(variable.shape))
        for bucket in self.buckets:
            assign(bucket.tally, np.zeros((2, 4)))
            bucket.adapt(bucket.state)
