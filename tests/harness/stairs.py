"""A schedule of the ratio, and warm-ups that end in the step that a test needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from horovod_sparse.compressors.schedules import Schedule
from horovod_sparse.core.plan import first_sparse_step


@dataclass(frozen=True)
class Halving(Schedule):
    """As a user writes it: the ratio halves every `every` steps."""

    highest: float = 0.4
    final: float = 0.1
    every: int = 1

    def ratio(self, step: int) -> float:
        return max(self.final, self.highest / 2 ** (step // self.every))


def dense_until(step: int, make: Callable[..., Any], world: Callable[[], int]) -> Callable[..., Any]:
    """Make compressors whose warm-up is dense until `step`. `world` tells the number of workers when one is made."""
    return partial(_dense_until, step, make, world)


def _dense_until(step: int, make: Callable[..., Any], world: Callable[[], int], **settings: Any) -> Any:
    made = (make(warmup=float(c), **settings) for c in np.geomspace(step / 64, 2 * step, 200))
    return next(one for one in made if first_sparse_step(one, world()) == step)
