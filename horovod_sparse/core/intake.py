"""What happens to a gradient before it is added to the residual: clipping, and its learning rate. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.momentum import Clip, clip_factor, scaled
from horovod_sparse.exchange.wire import LARGEST
from horovod_sparse.ops.protocol import Array, Momentum, Ops


class Arrived(NamedTuple):
    """A parameter's gradient in a step."""

    name: str
    gradient: Array | None
    """None if the parameter has no gradient in this step."""
    learning_rate: float | None = None


class Intake:
    """Prepares the gradients of one optimizer."""

    def __init__(self, ops: Ops, compressor: Compressor, world: int, *, averages: bool) -> None:
        self._ops = ops
        self._clip, self._holds_back = compressor.clip, compressor.holds_back
        self.in_updates = compressor.lr_in_residual
        """Whether residuals are in units of the update, so that learning rates are needed."""
        self._limit = self._clip.limit(world, averages=averages) if isinstance(self._clip, Clip) else 0.0
        self.scale = 1.0
        """The loss scale of this step: gradients arrive multiplied by it."""
        self._factor = None if self._holds_back else 1.0
        """The factor by which this step's gradients are clipped, with the scope "model"; None before the first step."""
        correction = compressor.momentum_correction
        self.momentum: Momentum | None = None if correction is None else correction.of_step
        """The momentum before the selection; None if the compressor has none."""

    def begin(self, gradients: Iterable[Array], scale: float) -> None:
        """Begin a step. If the compressor holds gradients back, these are all gradients of this rank."""
        self.scale = scale
        self._factor = clip_factor(self._ops, gradients, self._limit * scale) if self._holds_back else 1.0

    def prepared(self, gradient: Array, dtype: str) -> Array:
        """Return what is added to the residual: the gradient, clipped and divided by the loss scale; then of type `dtype`."""
        factor = self._factor
        if self._clip is not None and not self._holds_back:
            factor = clip_factor(self._ops, [gradient], self._limit * self.scale)
        assert factor is not None, "start_step is given all gradients"
        factor /= self.scale
        return gradient if factor == 1.0 else scaled(self._ops, gradient, factor, dtype)

    def rate(self, arrived: Arrived) -> float:
        """Return the unit of a gradient where residuals hold updates. Raise ValueError for an unusable learning rate."""
        name, _, learning_rate = arrived
        if learning_rate is None:
            raise ValueError("learning_rate must be given with lr_in_residual=True, got None")
        if learning_rate != 0.0 and not 1.0 / LARGEST <= learning_rate <= LARGEST:
            raise ValueError(
                f"the learning rate of parameter {name!r} must be 0, or a finite number > 0 that float32 holds, with "
                f"lr_in_residual=True; got {learning_rate!r}. Correct the schedule"
            )
        return float(learning_rate)
