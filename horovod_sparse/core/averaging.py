"""The weighted average of iterates that the theory of Sparsified SGD with Memory is about. No framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Array = Any


class WeightedAverage:
    """The average `xbar_T = (1/S_T) sum_t w_t x_t`, `w_t = (a + t)^2`, updated with every iterate.

    Theorem 2.4 of Sparsified SGD with Memory (https://arxiv.org/abs/1809.07599) bounds the error of this average, for
    stepsizes 8/(mu (a + t)). The update is `xbar <- (1 - rho_t) xbar + rho_t x_t` with `rho_t = w_t / S_{t+1}`.

    Args:
        shift: a, > 0, the shift of the stepsizes; d/k in practice.

    Raises:
        ValueError: naming the argument and its value.
    """

    def __init__(self, shift: float) -> None:
        if not shift > 0:
            raise ValueError(f"shift must be > 0, got {shift!r}")
        self.shift = float(shift)
        self.step = 0
        self.arrays: list[Array] = []
        """The averages, in arrays that belong to this object."""

    def update(self, iterates: Sequence[Array]) -> None:
        """Take in a step's iterates: arrays or tensors, whose number, shapes and types must not change. They are not kept."""
        a, t = self.shift, self.step
        rho = 6.0 * (t + a) ** 2 / ((t + 1.0) * (6.0 * a * a + t + 6.0 * a * t + 2.0 * t * t))
        # A parameter that is still part of a graph would keep every step's graph alive.
        plain = [iterate.detach() if hasattr(iterate, "detach") else iterate for iterate in iterates]
        if not self.arrays:
            self.arrays = [iterate * 1.0 for iterate in plain]
        else:
            for average, iterate in zip(self.arrays, plain, strict=True):
                average += rho * (iterate - average)
        self.step += 1
