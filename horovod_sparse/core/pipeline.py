"""The path of the data, shared by all frameworks: gradient -> residual -> selection -> exchange -> reduced gradient.

A `Pipeline` belongs to one optimizer. The adapter tells it which gradients have arrived, carries out the collectives, and
provides the memory that the reduced gradients are written to. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from horovod_sparse.compressors.base import Compressor, Place
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.dense import DenseParameters
from horovod_sparse.core.layout import Layout, Slot, check_limits
from horovod_sparse.core.preparation import Arrived, Preparation
from horovod_sparse.core.residuals import Residuals, multiply
from horovod_sparse.core.selector import DeviceSelectorFor, SlotGradient, no_device
from horovod_sparse.core.state import Kept, check_discardable, check_state
from horovod_sparse.core.statistics import Stats, combined
from horovod_sparse.exchange.protocols import Collective, Reduced, Sent
from horovod_sparse.ops.protocol import Array, Ops

_LASTING = 100
"""Number of consecutive steps with a truncated message after which a warning is issued."""

Write = Callable[[Sequence[Slot], Reduced], None]
"""Writes the reduced gradient to where the adapter wants it."""


class Pipeline:
    """Residuals, selection and reduction for the parameters of one optimizer.

    Args:
        ops: the framework's operations.
        compressor: settings and algorithm.
        world: number of workers that exchange.
        position: index of this worker among them, in [0, world).
        rank: this worker's global rank, for error messages.
        averages: True if the reduced gradient is the workers' mean, False if it is their sum; `clip_norm` depends on it.
        device_selector: returns what selects on a bucket's device, or None.
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
        device_selector: DeviceSelectorFor = no_device,
    ) -> None:
        self.ops = ops
        self.compressor = compressor
        self.world = world
        self.position = position
        self.rank = rank
        self._device_selector = device_selector
        self.residuals = Residuals(ops)
        self.velocities = Residuals(ops)
        """With momentum correction: velocities of the parameters in buckets and of those that are reduced dense."""
        self.buckets: list[Bucket] = []
        self.dense = DenseParameters(ops, compressor, self.velocities)
        self.preparation = Preparation(ops, compressor, world, averages=averages)
        self._kept = Kept(self.residuals, self.velocities, self.preparation, self.buckets)
        self.dense_bytes_sent = 0.0
        self._bucket_of: dict[str, Bucket] = {}
        self._not_finite: list[str] = []
        """What held NaN or infinity in this step: gradients of this rank in buckets. The next list holds what others found."""
        self._not_finite_elsewhere: list[str] = []
        self._open: list[Bucket] = []
        """Buckets that a gradient of this step has reached."""
        self._ended: list[Bucket] = []
        """Buckets of the last step, if it can be discarded."""
        self._warned = False

    def add_buckets(self, layouts: Sequence[Layout], like: Callable[[str], Array]) -> None:
        """Add buckets. `like(name)` returns an array on the device where the parameter's bucket will be kept."""
        check_limits(layouts, self.compressor, self.world)
        for layout in layouts:
            buffer = self.residuals.allocate(layout, like(layout.name))
            corrected = self.compressor.momentum_correction is not None
            velocity = self.velocities.allocate(layout, like(layout.name)) if corrected else None
            place = Place(layout.name, self.position, self.world)
            selector = self._device_selector
            bucket = Bucket(self.ops, self.compressor, layout, place, self.rank, buffer, velocity, selector)
            self.buckets.append(bucket)
            self._bucket_of.update(dict.fromkeys(bucket.slots, bucket))

    def add_dense(self, layouts: Sequence[Layout], like: Callable[[str], Array]) -> None:
        """Register the parameters that the adapter reduces dense. Those of one layout are reduced together."""
        self.dense.add(layouts, like)

    @property
    def nbytes(self) -> int:
        """Memory that the residuals take, in bytes."""
        return self.residuals.nbytes

    def bucket_of(self, name: str) -> Bucket:
        """Return the bucket that a parameter is in."""
        return self._bucket_of[name]

    def drop(self, name: str) -> None:
        """Forget what is kept of a parameter that is no longer trained. Call it between steps, or before it arrives."""
        if name in self._bucket_of:
            self.residuals.view(name)[:] = 0
            self._bucket_of[name].forget()
        if self.compressor.momentum_correction is not None:
            self.velocities.view(name)[:] = 0

    # --- a step: from gradients to messages, from messages to reduced gradients ---

    def start_step(self, gradients: Iterable[Array] = ()) -> None:
        """Begin a step, before its first gradient arrives. A step that has not ended is given up (`abort`).

        If the compressor's `holds_back` is True, `gradients` are all gradients of this rank, including those that are reduced
        dense.
        """
        self.abort()
        self.preparation.begin(gradients)

    def arrive(self, name: str, gradient: Array | None, learning_rate: float | None = None) -> Bucket | None:
        """Do as `arrive_together`, for one parameter."""
        return self.arrive_together(self._bucket_of[name], [Arrived(name, gradient, learning_rate)])

    def arrive_together(self, bucket: Bucket, arrived: Iterable[Arrived]) -> Bucket | None:
        """Add gradients of a bucket to its residual. Return the bucket if it is complete, else None.

        The gradients' memory is free afterwards. NaN and infinity are kept out of the residual. A sum that would overflow the
        residual stays at the largest number of its type. In both cases the bucket's exchange returns None on every rank.
        """
        gradients: list[SlotGradient] = []
        for name, gradient, learning_rate in arrived:
            if name not in bucket.missing:
                raise RuntimeError(f"the gradient of {name!r} arrived twice in one step")
            if not bucket.in_step:
                self._enter(bucket)
            bucket.missing.discard(name)
            if self.compressor.lr_in_residual:
                gradient = self._keep_unit(bucket, name, gradient, learning_rate)
            if gradient is not None:
                gradient = self.preparation.clipped(gradient, bucket.layout.residual_dtype)
            gradients.append((bucket.slots[name], gradient))
        bucket.accumulate(gradients)
        return None if bucket.missing else bucket

    def _enter(self, bucket: Bucket) -> None:
        """Add a bucket to the step when its first gradient arrives."""
        if not self._open:
            self.preparation.remember()
            self.dense.forget_before()
        self._open.append(bucket)
        bucket.begin_step()

    def _keep_unit(
        self, bucket: Bucket, name: str, gradient: Array | None, learning_rate: float | None
    ) -> Array | None:
        """Keep a residual in units of the update. Return the gradient if it counts: not if the learning rate is 0."""
        factor = self.preparation.change_of_unit(name, learning_rate)
        if factor is None:
            return None
        if factor != 1.0:
            residual = self.residuals.view(name)
            if gradient is None:
                multiply(residual, factor)
            else:
                # Adding the gradient notices what leaves the range.
                residual *= factor
        bucket.change_unit(factor)
        return gradient

    def begin(self, bucket: Bucket) -> Collective:
        """Select from a complete bucket; return its exchange's first collective. What is not selected stays in the residual."""
        return bucket.begin_exchange()

    def advance(self, bucket: Bucket, result: Array, divisor: float, write: Write) -> Collective | None:
        """Continue with the result of a bucket's collective. Return the next collective, or None at the end.

        At the end, `write` is called with the parameters' slots and a `Reduced`. It holds the bucket's entries, rank by rank in
        rank order, divided by `divisor`. If some rank's gradient was not finite, it holds nothing. The order is the same on
        all ranks, so that the sums of floats are equal to the last bit.
        """
        try:
            return bucket.advance(result)
        except StopIteration as end:
            sent: Sent = end.value
        own = bucket.conclude(sent)
        self._not_finite += [f"parameter {name!r}" for name in own]
        if sent is None and not own:
            self._not_finite_elsewhere.append(f"some parameter in bucket {bucket.name!r} of another rank")
        write(bucket.layout.slots, Reduced(self.ops, sent, divisor))
        return None

    def note_not_finite(self, name: str) -> None:
        """Let the step fail, because the reduced gradient of a parameter is not finite."""
        self._not_finite_elsewhere.append(f"parameter {name!r}")

    def check_reduced(self, name: str, reduced: Array) -> None:
        """Let the step fail if a reduced gradient that did not come through a bucket is not finite."""
        if not self.ops.all_finite(reduced):
            self.note_not_finite(name)

    def finish_dense(self, name: str, reduced: Array) -> None:
        """Apply momentum, in place, to a reduced gradient that did not come through a bucket.

        If several parameters are reduced together, `name` is the first one's, and their gradients lie one after the other.
        """
        for bad in self.dense.finish(name, reduced):
            self.note_not_finite(bad)

    def end_step(self) -> None:
        """End a step after all reduced gradients are there. It succeeds on every rank or fails on every rank.

        It fails if some rank's gradient held NaN or infinity, or overflowed a residual. Then what every bucket had
        sent returns to the residuals. They are finite and also hold the step's finite gradients; momentum has moved on. A
        failed step raises FloatingPointError on every rank, unless `not_finite="propagate"`. Training can go on.
        """
        found = self._not_finite + self._not_finite_elsewhere
        self._forget_step()
        self._ended, self._open = self._open, []
        for bucket in self._ended:
            bucket.end(succeeded=not found)
            if bucket.truncated_steps >= _LASTING and not self._warned:
                self._warned = True
                bucket.warn_truncated()
        if found and self.compressor.not_finite == "raise":
            raise FloatingPointError(
                f"rank {self.rank}: the gradient of {found[0]} holds NaN or infinity, or overflows its residual; it was kept "
                "out of the residual. Lower the learning rate, or with dynamic loss scaling use not_finite='propagate'"
            )

    # --- steps that are given up ---

    def _forget_step(self) -> None:
        self._not_finite, self._not_finite_elsewhere = [], []
        self.preparation.end()

    def abort(self) -> None:
        """Give up the step that has begun, if there is one, so that the next can begin after an exception.

        What the step had taken returns to the residuals. Every parameter's residual is then as before the step, or also holds
        its whole gradient if that had arrived. With `discardable`, everything is as before the step.
        """
        given_up, self._open = self._open, []
        self._forget_step()
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
        discardable = self.compressor.discardable
        for bucket in buckets:
            if not bucket.in_step:
                bucket.bring_back()
                continue
            bucket.give_up()
            for name in () if discardable else bucket.slots:
                # Ranks may have come to different points of the step, and must have the same thresholds again.
                factor = self.preparation.back_to_unit(name)
                if factor != 1.0:
                    multiply(self.residuals.view(name), factor)
        if buckets:
            self.preparation.bring_back(gradients_too=discardable)
            self.dense.bring_back()

    # --- statistics and state ---

    def stats(self) -> Stats:
        """Return counts and bytes per bucket and in total, of the last step and on average. They are computed now."""
        buckets = [(one.name, one.numel, one.tally, self.ops.norm(one.buffer)) for one in self.buckets]
        return combined(buckets, self.dense_bytes_sent)

    def state_dict(self) -> dict[str, Any]:
        """See `Kept.state_dict`."""
        return self._kept.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, strictly for the same model. The buckets may differ."""
        check_state(state, self.compressor, self.residuals.shapes, self.velocities.shapes)
        self._begin_afresh()
        self._kept.load(state)

    def rescale(self, factor: float) -> None:
        """Multiply residuals and velocities by `factor`. Earlier steps can no longer be discarded: they used another unit."""
        self._ended = []
        self._kept.rescale(factor)

    def reset(self) -> None:
        """Start afresh: residuals are zero, adaptive state and statistics are as before the first step."""
        self._begin_afresh()
        self._kept.reset()

    def _begin_afresh(self) -> None:
        """Give up the step that has begun, and forget the last one, so that none can be discarded."""
        self.abort()
        self._ended = []
