"""Hard threshold: a magnitude given by the user, for the whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from horovod_sparse.compressors.base import ALONE, POSITIVE, BucketState, Compressor, Place
from horovod_sparse.compressors.checks import check_number
from horovod_sparse.compressors.schedules import Schedule
from horovod_sparse.ops.protocol import Array, Ops, Selection


@dataclass
class ThresholdState(BucketState):
    """The unit of the residual, where it differs from the gradient's own (`lr_in_residual`, `rescale`)."""

    saved: ClassVar[tuple[str, ...]] = ("scale", "rate")
    ranges = BucketState.ranges | {"scale": POSITIVE, "rate": (0.0, POSITIVE[1])}
    scale: float = 1.0
    """Factor that the residual was multiplied by."""
    rate: float = 1.0
    """The first learning rate that was not 0, with `lr_in_residual`; 0 until it is known."""

    def rescale(self, factor: float) -> None:
        super().rescale(factor)
        self.scale *= factor

    def know_rate(self, rate: float) -> None:
        self.rate = self.rate or rate


@dataclass(eq=False, repr=False, kw_only=True)
class Threshold(Compressor):
    """Sends all entries of the accumulated gradient with `|u_i| > threshold`.

    As long as the message has room, every entry of the residual stays within the threshold, so the total error is bounded.

    With feedback, more entries are sent than exceed the threshold t in one gradient: a sum of independent entries of
    deviation s leaves [-t, t] after about `(t/s + 0.6)^2` steps.

    Args:
        threshold: a magnitude, finite, >= 0. It has the unit of the gradient. So its meaning changes with the model, with
            loss scaling and with the batch's averaging, and the count changes too. `1/(2 sqrt(k))` gives about k entries of
            the whole model per step, for gradients of norm about 1. Where residuals are rescaled (`rescale`) it follows them.
            With `lr_in_residual` it is multiplied by the first learning rate that is not 0, the largest one in a bucket.
        ratio: sets the size of the message and the target count in statistics, in (0, 1], or a schedule; nothing else depends
            on it. If more entries exceed the threshold than fit, the largest are sent and the rest count as truncated.
        others: those of `Compressor`. Message capacity is 16 ratio * numel unless `slack` says otherwise.
    """

    default_slack = 16.0
    default_warmup = None

    ratio: float | Schedule = 0.01
    threshold: float = field(kw_only=False)

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, "a finite magnitude >= 0", lambda number: 0.0 <= number < math.inf)
        self.threshold = float(self.threshold)
        super().__post_init__()

    def new_state(self, place: Place = ALONE) -> ThresholdState:
        return ThresholdState(place, rate=0.0 if self.lr_in_residual else 1.0)

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        assert isinstance(state, ThresholdState)
        state.threshold = self.threshold * state.scale * (state.rate or 1.0)
        state.expect(state.threshold, capacity)
        return ops.select_above(x, state.threshold, capacity)
