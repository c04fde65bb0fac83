"""What takes gradients into a bucket's residual, and selects from it: on the host, or on the bucket's device. No framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.compressors.checks import check_selection
from horovod_sparse.core.layout import Layout, Slot
from horovod_sparse.core.plan import Stage
from horovod_sparse.exchange import wire
from horovod_sparse.ops.protocol import Array, Hints, Momentum, Moving, Ops, Part, Selection

_FEW = 4
"""If more than one entry in `_FEW` exceeds the cut, none are noted: that would cost more memory and time than it saves."""
_NO_HINTS = Hints()

SlotGradient = tuple[Slot, Array | None]
"""A parameter's place in its bucket, and its gradient; None if the residual stays as it is in this step."""


class Outcome(NamedTuple):
    """What became of a selection."""

    sent: int = 0
    """Entries in the message."""
    truncated: int = 0
    """Entries that qualified, but for which the message had no room."""
    not_finite: Sequence[int] = ()
    """The offsets of the parameters whose gradients held NaN or infinity, or overflowed the residual. Then nothing was sent."""


class Selector(Protocol):
    """Takes gradients into one bucket and gives a message out.

    In a step `accumulate` is called for all parameters, a few at a time, then `message`. On a bucket's own device neither makes
    the host wait. `finish`, which is called when the collective has been started, may wait.
    """

    def begin(self, state: BucketState, stage: Stage) -> None:
        """Begin a step."""

    def accumulate(self, gradients: Sequence[SlotGradient], momentum: Momentum | None, rate: float) -> None:
        """Add gradients to the residual, through the velocity if there is a momentum, as `Ops.accumulate` does."""

    def message(self) -> Array:
        """Select, and return the message of pairs (`wire`, message 1). Its entries are no longer in the residual."""

    def finish(self) -> Outcome:
        """Return what became of the selection. From here on, the state has learned from it."""

    def forget(self) -> None:
        """Forget what was seen before, because the residual or the state was changed from outside, or the step was given up."""


DeviceSelectorFor = Callable[[Compressor, Layout, Array, Array | None], Selector | None]
"""Returns what selects on the device of a new bucket with this residual and velocity, or None if the host does."""


class HostSelector:
    """Selects by the operations of the framework, as the compressor's `select` says. The arrays may be on any device."""

    def __init__(self, ops: Ops, compressor: Compressor, buffer: Array, velocity: Array | None, stage: Stage) -> None:
        self._ops, self._compressor = ops, compressor
        self._buffer, self._velocity = buffer, velocity
        self._tracked = ops.tracked(buffer)
        self._few = len(buffer) // _FEW
        # The tests hold the package's own classes to it.
        self._is_foreign = not type(compressor).__module__.startswith(f"{__package__.partition('.')[0]}.")
        self._state, self._stage = BucketState(), stage
        self.not_finite: list[int] = []
        """The offsets of the parameters whose gradients in this step were not finite."""
        self._outcome = Outcome()

    def begin(self, state: BucketState, stage: Stage) -> None:
        self._state, self._stage, self.not_finite = state, stage, []
        self._tracked.begin(_NO_HINTS if stage.is_dense else self._compressor.hints(state, self._few))

    def accumulate(self, gradients: Sequence[SlotGradient], momentum: Momentum | None, rate: float) -> None:
        parts: list[Part] = [(slot.offset, gradient) for slot, gradient in gradients if gradient is not None]
        if not parts:
            return
        moving = None if momentum is None or self._velocity is None else Moving(self._velocity, momentum)
        # Entries are noted in this order, which should be that of the buffer.
        parts.sort(key=itemgetter(0))
        bad = self._tracked.take_in(parts, moving, rate)
        if any(bad):
            self.not_finite += [offset for (offset, _), number in zip(parts, bad, strict=True) if number]

    def select(self) -> Selection:
        """Return what the compressor selects from the residual."""
        stage = self._stage
        selection = self._compressor.select(self._tracked, self._buffer, stage.k, stage.capacity, self._state)
        self._tracked.forget()
        if self._is_foreign:
            check_selection(type(self._compressor).__name__, selection, self._buffer, stage.capacity)
        return selection

    def message(self) -> Array:
        if self.not_finite:
            indices, found = self._ops.indices(np.empty(0, np.int64), self._buffer), 0
        else:
            indices, found, _ = self.select()
        count = len(indices)
        self._outcome = Outcome(count, found - count, self.not_finite)
        message = self._ops.take_pairs_out(self._buffer, indices, self._stage.capacity)
        if self.not_finite:
            message[0, 0] = wire.NOT_FINITE
        return message

    def finish(self) -> Outcome:
        return self._outcome

    def forget(self) -> None:
        self._tracked.forget()
