"""What happens to a gradient before it is added to the residual: clipping, loss scale, learning rate. Imports no framework.

Tested by tests/compressors/test_momentum.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.momentum import clip_factor, scaled
from horovod_sparse.exchange.wire import LARGEST
from horovod_sparse.ops.protocol import Array, Ops

Prepare = Callable[[Array, str], Array]
"""Returns what is added to a residual of this type for a gradient: the gradient itself, or a scaled copy of that type."""


class Intake:
    """How the gradients of one model are prepared, and their sums divided, as long as the loss scale is the same."""

    def __init__(
        self, ops: Ops, compressor: Compressor, world: int, *, averages: bool = True, scale: float = 1.0
    ) -> None:
        self._ops = ops
        self.scale = scale
        """The loss scale: gradients arrive multiplied by it, and so are the reduced ones. Residuals are not."""
        self.divisor = (world if averages else 1.0) / scale
        """The number by which sums of what the workers have sent are divided. It gives them the loss scale back."""
        clip, root = compressor.clip, math.sqrt(world)
        self._limit = None if clip is None else clip * root if averages else clip / root
        """The largest norm of this worker's gradient of a parameter; None if nothing is clipped."""
        correction = compressor.momentum_correction
        self.momentum = None if correction is None else correction.momentum
        """The momentum before the selection."""
        self.prepare: Prepare | None = None if self._limit is None and scale == 1.0 else self._prepared

    def _prepared(self, gradient: Array, dtype: str) -> Array:
        limit, scale = self._limit, self.scale
        factor = (1.0 if limit is None else clip_factor(self._ops, gradient, limit * scale)) / scale
        return gradient if factor == 1.0 else scaled(self._ops, gradient, factor, dtype)


def checked_rate(name: str, learning_rate: float | None) -> float:
    """Return the unit of a gradient where residuals hold updates. Raise ValueError for an unusable learning rate."""
    if learning_rate is None:
        raise ValueError("learning_rate must be given with lr_in_residual=True, got None")
    if learning_rate != 0.0 and not 1.0 / LARGEST <= learning_rate <= LARGEST:
        raise ValueError(
            f"the learning rate of parameter {name!r} must be 0, or a finite number > 0 that float32 holds, with "
            f"lr_in_residual=True; got {learning_rate!r}. Correct the schedule"
        )
    return float(learning_rate)
