"""What happens to a gradient on its way into the residual: clipping and momentum, before the selection. No framework."""

from __future__ import annotations

import math
from dataclasses import dataclass

from horovod_sparse.ops import Array, Ops


@dataclass(frozen=True)
class MomentumCorrection:
    """Momentum before the selection (Deep Gradient Compression, https://arxiv.org/abs/1712.01887).

    The residual accumulates the velocity instead of the gradient, `U = m U + G; V = V + U`, and V is what is selected
    from; with Nesterov's form `U = m (U + G); V = V + U + G`. The optimizer must then have no momentum of its own.

    Args:
        momentum: m, in [0, 1).
        nesterov: Nesterov's form.
        masking: whether U, like V, becomes zero where entries were sent, so that stale momentum stops there. With ratio 1
            that leaves plain SGD, since everything is sent in every step.

    Raises:
        ValueError: naming the argument and its value.
    """

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.momentum, bool) or not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")
        for name in ("nesterov", "masking"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def accumulate(self, ops: Ops, residual: Array, velocity: Array, gradient: Array | None) -> None:
        """Take a gradient (None: zero) into velocity and residual, in place; the gradient is left as it is."""
        if self.nesterov:
            if gradient is not None:
                ops.accumulate(velocity, gradient)
                ops.accumulate(residual, gradient)
            velocity *= self.momentum
        else:
            velocity *= self.momentum
            if gradient is not None:
                ops.accumulate(velocity, gradient)
        ops.accumulate(residual, velocity)


def clip(ops: Ops, gradient: Array, clip_norm: float, world: int, dtype: str) -> Array:
    """A copy, of `dtype`, of one parameter's gradient, scaled down to the norm `clip_norm / sqrt(world)` if it is larger.

    The sum of `world` independent gradients of that norm has norm `clip_norm`, as has a single worker's.
    """
    flat = ops.zeros(math.prod(gradient.shape), dtype, gradient)
    ops.assign(flat, gradient)
    norm, limit = ops.norm(flat), clip_norm / math.sqrt(world)
    if norm > limit:
        flat *= limit / norm
    return flat.reshape(gradient.shape)
