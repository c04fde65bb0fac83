"""What happens to a gradient before it is added to the residual: clipping, loss scale, learning rate. Imports no framework.

Tested by tests/compressors/test_momentum.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.momentum import Clip, clip_factor, scaled
from horovod_sparse.exchange.wire import LARGEST
from horovod_sparse.ops.protocol import Array, Momentum, Ops

Prepare = Callable[[Array, str], Array]
"""Returns what is added to a residual of this type for a gradient: the gradient itself, or a scaled copy of that type."""


class Terms(NamedTuple):
    """What holds for all buckets in one step."""

    momentum: Momentum | None
    """The momentum before the selection."""
    prepare: Prepare | None
    """What prepares a gradient; None if nothing does."""
    scale: float
    """The loss scale: gradients arrive multiplied by it, and so are the reduced ones. Residuals are not."""
    divisor: float
    """The number by which sums of what the workers have sent are divided. It gives them the loss scale back."""


class Intake:
    """How the gradients of one model are prepared, and their sums divided, the same in every step."""

    def __init__(self, ops: Ops, compressor: Compressor, world: int, *, averages: bool) -> None:
        self._ops = ops
        self._divisor = float(world) if averages else 1.0
        self._clip = clip = compressor.clip if isinstance(compressor.clip, Clip) else None
        self._limit = 0.0 if clip is None else clip.limit(world, averages=averages)
        correction = compressor.momentum_correction
        self._momentum: Momentum | None = None if correction is None else correction.of_step

    def terms(self, gradients: Iterable[Array], scale: float) -> Terms:
        """Return what holds in a step with this loss scale. `gradients` are all of this rank, if they are clipped together."""
        prepare = None if self._clip is None and scale == 1.0 else self._preparation(gradients, scale)
        return Terms(self._momentum, prepare, scale, self._divisor / scale)

    def _preparation(self, gradients: Iterable[Array], scale: float) -> Prepare:
        ops, clip, limit = self._ops, self._clip, self._limit * scale
        together = None
        if clip is None:
            together = 1.0
        elif clip.scope == "model":
            together = clip_factor(ops, gradients, limit)

        def prepare(gradient: Array, dtype: str) -> Array:
            factor = (clip_factor(ops, [gradient], limit) if together is None else together) / scale
            return gradient if factor == 1.0 else scaled(ops, gradient, factor, dtype)

        return prepare


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
