"""What happens to a gradient before it is added to the residual: clipping, and its unit. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from horovod_sparse.compressors import momentum
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.ops.protocol import Array, Ops


class Arrived(NamedTuple):
    """A parameter's gradient in a step."""

    name: str
    gradient: Array | None
    """None if the parameter has no gradient in this step."""
    learning_rate: float | None = None
    """Learning rate of the step, for `lr_in_residual`."""


class Preparation:
    """Prepares the gradients of one optimizer."""

    def __init__(self, ops: Ops, compressor: Compressor, world: int, *, averages: bool) -> None:
        self._ops = ops
        self._norm, self._holds_back = compressor.clip_norm, compressor.holds_back
        self._limit = 0.0 if self._norm is None else momentum.clip_limit(self._norm, world, averages=averages)
        self.scale = 1.0
        """The loss scale of this step: gradients arrive multiplied by it."""
        self._factor: float | None = None
        """The factor by which this step's gradients are clipped, with `clip_scope="model"`."""
        self.learning_rates: dict[str, float] = {}
        """The last learning rate of each parameter that is not zero, with `lr_in_residual`."""
        self._rates_before: dict[str, float] = {}

    def begin(self, gradients: Iterable[Array], scale: float) -> None:
        """Begin a step. If the compressor holds gradients back, these are all gradients of this rank."""
        self.scale = scale
        self._factor = momentum.clip_factor(self._ops, gradients, self._limit * scale) if self._holds_back else None

    def end(self) -> None:
        """End a step: its clipping factor is that of no other."""
        self._factor = None

    def clipped(self, gradient: Array, dtype: str) -> Array:
        """Return this rank's gradient of a parameter. With `clip_norm` it has type `dtype` and is scaled down if necessary."""
        if self._norm is None:
            return gradient
        if not self._holds_back:
            return momentum.clip(self._ops, gradient, self._limit * self.scale, dtype)
        if self._factor is None:
            raise RuntimeError("start_step must be given all gradients with clip_scope='model'; this is a defect")
        return momentum.scaled(self._ops, gradient, self._factor, dtype)

    def prepared(self, gradient: Array, dtype: str) -> Array:
        """Return what is added to the residual: the gradient, clipped and divided by the loss scale."""
        clipped = self.clipped(gradient, dtype)
        return clipped if self.scale == 1.0 else momentum.scaled(self._ops, clipped, 1.0 / self.scale, dtype)

    def change_of_unit(self, name: str, learning_rate: float | None) -> float | None:
        """Record a parameter's learning rate. Return the factor that brings its residual to the new unit of the update.

        If the rate is 0, return None and record nothing: the gradient adds nothing.
        """
        if learning_rate is None:
            raise ValueError("learning_rate must be given with lr_in_residual=True, got None")
        if learning_rate == 0.0:
            return None
        factor = self.learning_rates.get(name, learning_rate) / learning_rate
        self.learning_rates[name] = learning_rate
        return factor

    def remember(self) -> None:
        """Remember the learning rates, in case the step that begins is given up."""
        self._rates_before = dict(self.learning_rates)

    def back_to_unit(self, name: str) -> float:
        """Return the factor that brings a parameter's residual back to the unit that was remembered, if it had one."""
        rate = self.learning_rates.get(name)
        return 1.0 if rate is None else rate / self._rates_before.get(name, rate)

    def bring_back(self, *, gradients_too: bool) -> None:
        """Go back to the learning rates that were remembered. A gradient that was first of its parameter stays in its unit."""
        self.learning_rates = {**({} if gradients_too else self.learning_rates), **self._rates_before}
