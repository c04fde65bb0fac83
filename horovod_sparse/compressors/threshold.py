"""Hard threshold: a magnitude given by the user, for the whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.compressors.checks import check_number
from horovod_sparse.compressors.schedules import Schedule
from horovod_sparse.ops.protocol import Array, Ops, Selection


@dataclass(eq=False, repr=False, kw_only=True)
class Threshold(Compressor):
    """Sends all entries of the accumulated gradient with `|u_i| > threshold`.

    As long as the message has room, every entry of the residual stays within the threshold, so the total error is bounded.

    With feedback, more entries are sent than exceed the threshold t in one gradient: a sum of independent entries of
    deviation s leaves [-t, t] after about `(t/s + 0.6)^2` steps.

    Args:
        threshold: a magnitude, finite, >= 0. It has the unit of the residual: that of the gradient, or with `lr_in_residual`
            that of the update. So its meaning changes with the model, with loss scaling and with the batch's averaging, and
            the count changes too. `1/(2 sqrt(k))` gives about k entries of the whole model per step, for gradients of norm
            about 1.
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

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        state.threshold = self.threshold
        state.expect(self.threshold)
        return ops.select_above(x, self.threshold, capacity)
