"""The path of the data, shared by all frameworks: gradient -> residual -> selection -> exchange -> reduced gradient.

A `Pipeline` belongs to one optimizer. The adapter tells it which gradients have arrived, carries out the collectives, and
provides the memory that the reduced gradients are written to. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.kept import Kept
from horovod_sparse.core.layout import Slot
from horovod_sparse.core.preparation import Arrived
from horovod_sparse.core.residuals import multiply
from horovod_sparse.core.selector import SlotGradient
from horovod_sparse.core.state import check_discardable, check_state
from horovod_sparse.exchange.protocols import Collective, Reduced, Sent
from horovod_sparse.ops.protocol import Array

Write = Callable[[Sequence[Slot], Reduced], None]
"""Writes the reduced gradient to where the adapter wants it."""
Wait = Callable[[], Array]
"""Waits for a collective that was started, and returns its result."""
UnderWay = tuple[Bucket, Wait]
Start = Callable[[Bucket, Collective], Wait]


class Pipeline(Kept):
    """Selection and reduction for the parameters of one optimizer. See `Kept` for its arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._not_finite: list[str] = []
        """What held NaN or infinity in this step: gradients of this rank in buckets. The next list holds what others found."""
        self._not_finite_elsewhere: list[str] = []
        self._open: list[Bucket] = []
        """Buckets that a gradient of this step has reached."""
        self._ended: list[Bucket] = []
        """Buckets of the last step, if it can be discarded."""
        self._warned = False
        self._has_scaler = False
        """Whether a loss scaler leaves out the update of a step that fails."""

    # --- a step: from gradients to messages, from messages to reduced gradients ---

    def start_step(self, gradients: Iterable[Array] = (), scale: float | None = None) -> None:
        """Begin a step, before its first gradient arrives. A step that has not ended is given up (`abort`).

        If the compressor's `holds_back` is True, `gradients` are all gradients of this rank, including those that are reduced
        dense. With a loss scaler, `scale` is its scale: gradients arrive multiplied by it, and so are the reduced ones.
        Residuals are kept without it.
        """
        self.abort()
        self._has_scaler = scale is not None
        self.preparation.begin(gradients, 1.0 if scale is None else scale)

    def arrive(self, name: str, gradient: Array | None, learning_rate: float | None = None) -> Bucket | None:
        """Do as `arrive_together`, for one parameter."""
        return self.arrive_together(self.bucket_of[name], [Arrived(name, gradient, learning_rate)])

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
                gradient = self.preparation.prepared(gradient, bucket.layout.residual_dtype)
            gradients.append((bucket.slots[name], gradient))
        bucket.accumulate(gradients)
        return None if bucket.missing else bucket

    def _enter(self, bucket: Bucket) -> None:
        """Add a bucket to the step when its first gradient arrives."""
        if not self._open:
            self.preparation.remember()
            self._dense_before.clear()
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

    def note_not_finite(self, name: str) -> None:
        """Let the step fail, because the reduced gradient of a parameter is not finite."""
        self._not_finite_elsewhere.append(f"parameter {name!r}")

    def finish_dense(self, name: str, reduced: Array) -> None:
        """Apply momentum, in place, to a reduced gradient that did not come through a bucket.

        If several parameters are reduced together, `name` is the first one's, and their gradients lie one after the other.
        """
        for bad in self._correct_dense(name, reduced):
            self.note_not_finite(bad)

    def end_step(self) -> None:
        """End a step after all reduced gradients are there. It succeeds on every rank or fails on every rank.

        It fails if some rank's gradient held NaN or infinity, or overflowed a residual. Then what every bucket had
        sent returns to the residuals. They are finite and also hold the step's finite gradients; momentum has moved on. A
        failed step raises FloatingPointError on every rank, unless `not_finite="propagate"`. Training can go on.
        With a loss scaler, which leaves out the update, the failed step is discarded instead.
        """
        found = self._not_finite + self._not_finite_elsewhere
        self._forget_step()
        self._ended, self._open = self._open, []
        for bucket in self._ended:
            bucket.end(succeeded=not found)
            if bucket.lacks_room and not self._warned:
                self._warned = True
                bucket.warn_truncated()
        if found and self._has_scaler:
            self._discard_last()
        elif found and self.compressor.not_finite == "raise":
            raise FloatingPointError(
                f"rank {self.rank}: the gradient of {found[0]} holds NaN or infinity, or overflows its residual; it was kept "
                "out of the residual. Lower the learning rate, or set not_finite='propagate'"
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
        if given_up:
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
        self._discard_last()

    def _discard_last(self) -> None:
        ended, self._ended = self._ended, []
        self._bring_back(ended)

    # --- state: a step that has begun is given up, and the last one can no longer be discarded ---

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, self.compressor, self.residuals.shapes, self.velocities.shapes)
        self._begin_afresh()
        super().load_state_dict(state)

    def change_workers(self, *, world: int, position: int, rank: int) -> None:
        self._begin_afresh()
        super().change_workers(world=world, position=position, rank=rank)

    def rescale(self, factor: float) -> None:
        self._ended = []
        super().rescale(factor)

    def decay(self, factor: float) -> None:
        self._ended = []
        super().decay(factor)

    def reset(self) -> None:
        self._begin_afresh()
        super().reset()

    def _begin_afresh(self) -> None:
        self.abort()
        self._ended = []
