"""How long a worker's update is beside the mean of all workers' updates. Imports no framework."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ENTRIES = 256
_DECAY = 0.95


class Lengths:
    """Tells by how much updates must grow so that their mean is as long as one of them.

    Optimizers that divide by the gradient's size make updates u_r of about one length, however much of a gradient is noise. In
    the mean over n workers the noise cancels, so that the mean is up to sqrt(n) times shorter than dense training's update.
    Each worker therefore multiplies its update of step T by

        s_T = sqrt(sum_t 0.95^(T-t) mean_r |u_r,t|^2 / sum_t 0.95^(T-t) |mean_r u_r,t|^2)    over all t < T,

    at least 1 and at most sqrt(n). The lengths are those of 256 entries, which are the same in every step.
    """

    def __init__(self) -> None:
        self.grow = True
        """Whether updates grow. If the optimizer does not divide, their mean is dense training's update already."""
        self._own = self._mean = 0.0

    def factor(self, world: int) -> float:
        """Return s for this step of `world` workers; 1 before the first step."""
        if not self.grow or self._own <= self._mean:
            return 1.0
        return math.sqrt(min(self._own / self._mean, world) if self._mean > 0.0 else world)

    def note(self, means: Sequence[float]) -> None:
        """Note a step: the means over all workers of the entries of an update, and of their sum of squares, which is last."""
        *entries, own = means
        mean = math.fsum(entry * entry for entry in entries)
        # Where an update holds NaN or infinity, the step fails on all workers.
        if math.isfinite(own) and math.isfinite(mean):
            self._own, self._mean = _DECAY * self._own + float(own), _DECAY * self._mean + mean

    def state(self) -> list[float]:
        """Return what `load` continues from."""
        return [self._own, self._mean]

    def load(self, state: Sequence[float] | None) -> None:
        """Continue from what `state` has returned; from nothing if that is None."""
        self._own, self._mean = state or (0.0, 0.0)


def sampled(sizes: Sequence[int]) -> list[NDArray[np.int64]]:
    """Return the positions of the entries whose lengths are compared, in arrays of these sizes, the same on all workers."""
    chosen = np.random.default_rng(0).integers(0, max(sum(sizes), 1), ENTRIES)
    begins = np.cumsum([0, *sizes])
    return [chosen[(begin <= chosen) & (chosen < end)] - begin for begin, end in itertools.pairwise(begins)]
