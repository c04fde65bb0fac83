"""Clipping and momentum: what happens to a gradient on its way into the residual, before the selection. No framework."""

from __future__ import annotations

import math
from dataclasses import dataclass

from horovod_sparse.compressors.checks import check_flag, check_number, plain, shown
from horovod_sparse.ops.protocol import Array, Ops


@dataclass(frozen=True)
class MomentumCorrection:
    """Momentum before the selection (Deep Gradient Compression, https://arxiv.org/abs/1712.01887).

    The residual V accumulates the velocity U instead of the gradient G: `U = m U + G; V = V + U`. Entries are selected from V.
    The optimizer must have no momentum of its own.

    Args:
        momentum: m, in [0, 1).
        masking: whether U, like V, becomes zero where entries were sent, so that stale momentum stops there. With ratio 1
            the result is plain SGD, since everything is sent in every step.
    """

    momentum: float = 0.9
    masking: bool = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, plain(value))
        check_number("momentum", self.momentum, "in [0, 1)", lambda m: 0.0 <= m < 1.0)
        check_flag("masking", self.masking)

    def __repr__(self) -> str:
        return shown("MomentumCorrection", vars(self), {"masking": True})


def check_momentum(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a momentum or None."""
    if value is not None and not isinstance(value, MomentumCorrection):
        check_number(name, value, "in [0, 1), a MomentumCorrection or None", lambda m: 0.0 <= m < 1.0)


def clip_factor(ops: Ops, gradient: Array, limit: float) -> float:
    """Return the factor that scales a gradient down if the norm of its finite entries exceeds `limit`."""
    dtype = "float64" if str(gradient.dtype).endswith("float64") else "float32"
    norm = _finite_norm(ops, scaled(ops, gradient, 1.0, dtype).reshape(-1), dtype)
    return min(1.0, limit / norm) if norm > 0.0 else 1.0


def scaled(ops: Ops, gradient: Array, factor: float, dtype: str) -> Array:
    """Return a copy of a gradient times `factor`, as `dtype`."""
    copied = ops.zeros(math.prod(gradient.shape), dtype, gradient)
    ops.assign(copied, gradient)
    if factor != 1.0:
        copied *= factor
    return copied.reshape(gradient.shape)


def _finite_norm(ops: Ops, flat: Array, dtype: str) -> float:
    norm = ops.norm(flat)
    if math.isfinite(norm):
        return norm
    # NaN and infinity stay in the gradient, so that they are noticed. They must not decide how other entries are scaled.
    finite = ops.zeros(len(flat), dtype, flat)
    ops.accumulate(finite, [(0, flat)])
    largest = ops.measure(finite).largest
    if largest > 0.0:
        # The squares of very large entries leave the range of float64.
        finite /= largest
    return largest * ops.norm(finite)
