"""One step: what has arrived, what is under way, what comes of it. Made at its first gradient, discarded at its end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.core.intake import checked_rate
from horovod_sparse.core.layout import Slot
from horovod_sparse.core.sending import DeviceSending, Sending
from horovod_sparse.exchange.protocols import Asked, Collective, Reduced, Told
from horovod_sparse.ops.protocol import Array

Wait = Callable[[], Array]
"""Waits for a collective that was started, and returns its result."""
Write = Callable[[Sequence[Slot], Reduced], None]
"""Writes the reduced gradient to where the adapter wants it."""
Everyone = Callable[[Any], list[Any]]
"""Returns every worker's value."""


def given_up_by(other: int, rank: int) -> RuntimeError:
    """Return what a rank raises when another one has given the step up."""
    return RuntimeError(
        f"rank {rank}: rank {other} has given up this step after an exception, so this rank gives it up too; see what the "
        "other rank reports. Nothing of the step is left on any rank, and all ranks may go on"
    )


class Step:
    """One step of a worker. At its end it commits or brings back all that it has changed.

    Args:
        feedback: what lasts from step to step.
        scale: that of a loss scaler: gradients arrive multiplied by it, and so are the reduced ones. Residuals are not.

    Raises:
        RuntimeError: an exchange of an earlier step has ended by an exception.
    """

    def __init__(self, feedback: Feedback, scale: float = 1.0) -> None:
        if feedback.is_broken:
            raise RuntimeError(
                f"rank {feedback.rank}: an exchange has ended by an exception before, so what waits here may not fit to the "
                "other ranks; load a state on all ranks, or call compression.reset() (in NumPy SparseAllreduce.reset()) on all"
            )
        self.feedback = feedback
        self.intake = feedback.intake if scale == 1.0 else feedback.new_intake(scale=scale)
        self.added: set[str] = set()
        """The parameters whose gradient has arrived, or of which it is known that they have none."""
        self.sendings: dict[str, Sending] = {}
        """Those of the buckets that a gradient of this step has reached, by bucket, in the order of their first gradients."""
        self.given_up = False
        """Whether this rank gives the step up."""
        self.fails = False
        """Whether the step is known to fail: a gradient of some rank is not finite."""
        self._asking: list[tuple[Sending, Told]] = []
        """What is to be learned, for which buckets."""
        self._bad: list[str] = []
        """This rank's parameters beside the buckets whose gradients are not finite."""

    def add(self, name: str, gradient: Array | None, learning_rate: float | None = None) -> Sending | None:
        """Add the gradient of a parameter to its bucket, and return that if it is complete.

        The gradient must stay as it is until the step ends. What waits of a parameter without a gradient is set aside.

        Raises:
            RuntimeError: the gradient has arrived before in this step.
            ValueError: `lr_in_residual` cannot use the learning rate.
        """
        feedback = self.feedback
        rate = checked_rate(name, learning_rate) if feedback.compressor.lr_in_residual else None
        if name in self.added:
            raise RuntimeError(f"the gradient of {name!r} arrived twice in one step")
        self.added.add(name)
        sending = self._reach(feedback.bucket_of[name])
        if gradient is None:
            feedback.residuals.set_aside(name)
        elif feedback.residuals.aside:
            feedback.residuals.put_back(name)
        sending.add(name, gradient, rate)
        return None if sending.missing else sending

    def _reach(self, bucket: Bucket) -> Sending:
        sending = self.sendings.get(bucket.name)
        if sending is None:
            if bucket.device is None:
                sending = Sending(bucket, self.intake)
            else:
                sending = DeviceSending(bucket, self.intake, bucket.device)
            self.sendings[bucket.name] = sending
        return sending

    def spoil(self, bucket: Bucket) -> Sending:
        """Let this rank give the step up, and return a bucket that is to say so: its exchange has not begun yet."""
        self.given_up = True
        sending = self._reach(bucket)
        sending.spoil()
        return sending

    def fail(self, names: Sequence[str] = ()) -> None:
        """Let the step fail, as it must on all ranks: gradients of these parameters beside the buckets are not finite."""
        self.fails = True
        self._bad += names

    def advance(self, results: Sequence[tuple[Sending, Array]]) -> list[tuple[Sending, Collective]]:
        """Continue with the results of buckets' collectives. Return the next collectives; a bucket that is ready has none.

        What the host must learn of a device is read together, when no bucket has a collective to start.
        """
        following: list[tuple[Sending, Collective]] = []
        asked: list[tuple[Sending, Asked | None]] = []
        for sending, result in results:
            asked.append((sending, sending.receive(result)))
        while True:
            for sending, one in asked:
                if isinstance(one, Told):
                    self._asking.append((sending, one))
                elif one is not None:
                    following.append((sending, one))
                self.fails |= sending.fails
            if following or not self._asking:
                return following
            asking, self._asking, asked = self._asking, [], []
            arrays: list[Array] = []
            for _, told in asking:
                arrays += told.arrays
            numbers = self.feedback.ops.told(arrays)
            for sending, told in asking:
                count = len(told.arrays)
                asked.append((sending, sending.advance(numbers[:count])))
                del numbers[:count]

    def finish(self, write: Write, everyone: Everyone | None = None) -> None:
        """End the step, all of whose exchanges have ended, and write all reduced gradients.

        If a gradient of some rank is not finite, the reduced gradients of its bucket are NaN on every rank, and the step has
        never been: residuals, velocities and adaptive state are as before it. `everyone` then tells all ranks why.

        Raises:
            RuntimeError: another rank has given the step up. All ranks may go on.
        """
        feedback = self.feedback
        if self.fails:
            self._tell(everyone)
            # Before the reduced gradients take the place of those that are to be taken out again.
            self.abandon()
        else:
            truncated = False
            for sending in self.sendings.values():
                sending.commit()
                truncated |= sending.bucket.truncated_steps > 0
            if truncated:
                feedback.warn_truncated()
        for sending in () if self.given_up else self.sendings.values():
            write(sending.layout.slots, Reduced(feedback.ops, sending.sent_by_all, self.intake.divisor, sending.rates))

    def _tell(self, everyone: Everyone | None) -> None:
        """Warn once of gradients that are not finite. Raise RuntimeError if another rank has given the step up."""
        feedback = self.feedback
        mine: dict[str, Any] = {"rank": feedback.rank, "given up": self.given_up, "bad": self.bad()}
        told = [mine] if everyone is None else everyone(mine)
        gone = [one["rank"] for one in told if one["given up"]]
        if gone and not self.given_up:
            self.abandon()
            raise given_up_by(gone[0], feedback.rank)
        if not feedback.warned_not_finite and not gone:
            feedback.warned_not_finite = True
            bad = [f"{name!r} on rank {one['rank']}" for one in told for name in one["bad"]]
            warnings.warn(
                f"horovod_sparse: rank {feedback.rank}: the gradient of {bad[0] if bad else 'a parameter on another rank'} "
                "holds NaN or infinity, or a sum of gradients overflows. The reduced gradient of its bucket is NaN on all "
                "ranks, as a dense average would be, and residuals are as before the step. This is said once",
                stacklevel=2,
            )

    def bad(self) -> list[str]:
        """Return this rank's parameters whose gradients are known not to be finite."""
        return [*self._bad, *(name for sending in self.sendings.values() for name in sending.bad())]

    def abandon(self) -> None:
        """Bring back all that the step has changed, on this rank alone. It has never been."""
        for sending in self.sendings.values():
            sending.undo()
