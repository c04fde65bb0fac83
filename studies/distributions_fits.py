"""Fits of distributions to one gradient in stages, how good they are, and what top-k leaves of it. For `distributions.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.compressors import gaussiank
from horovod_sparse.compressors.sidco import FIRST_RATIO
from horovod_sparse.estimation import fits
from horovod_sparse.numpy.ops import NumpyOps
from horovod_sparse.ops.protocol import Moments

OPS = NumpyOps()
RAW = "gradient alone"
STAGES = (1, 2, 3)
KEPT = np.geomspace(1e-4, 1.0, 81)
"""Parts of the entries at which the squared norm of the largest entries is noted."""
Gradient = NDArray[np.float32]
SURVIVAL = np.concatenate([np.linspace(0.998, 0.002, 499), np.geomspace(0.002, 1e-6, 60)[1:]])
"""Probabilities of larger magnitudes at which a fit is compared with the data."""
BLOCKS = 100
"""The curve of sorted squares is looked at in so many steps, to see its shape and not its noise."""
Quantile = Callable[[Moments, float], float]
"""(moments of magnitudes, probability of larger ones) -> magnitude."""


class Family(NamedTuple):
    """What is fitted to all magnitudes, and what to the excesses over an earlier threshold."""

    name: str
    first: Quantile
    tail: Quantile | None


def _exponential(moments: Moments, p: float) -> float:
    return fits.exponential(moments.mean, p)


def _gpareto(moments: Moments, p: float) -> float:
    return fits.generalized_pareto(moments.mean, moments.variance, p)


FAMILIES = (
    Family("Gaussian", lambda moments, p: gaussiank.fit(moments, p * moments.count, moments.count), None),
    Family("exponential", _exponential, _exponential),
    Family("gamma", lambda moments, p: fits.gamma(moments.mean, moments.mean_log, p), _gpareto),
    Family(
        "gamma, closed form",
        lambda moments, p: fits.gamma(moments.mean, moments.mean_log, p, closed_form=True),
        _gpareto,
    ),
    Family("gpareto", _gpareto, _gpareto),
)


class Fitted(NamedTuple):
    """The last stage of an estimate: the excesses over `start` have these moments, and this is fitted to them."""

    start: float
    moments: Moments
    quantile: Quantile

    def threshold(self, p: float) -> float:
        """The magnitude that a part p of the entries above `start` exceeds, according to the fit."""
        return self.start + self.quantile(self.moments, p)


@dataclass(frozen=True)
class Quality:
    """How good a fit is on one gradient."""

    family: str
    stages: int
    ratio: float
    count: float
    """Achieved / asked."""
    error: float
    """Of the threshold, relative to the exact one."""
    distance: float
    """Kolmogorov and Smirnov's, of the magnitudes that the last stage is fitted to."""


@dataclass(frozen=True)
class Snapshot:
    """One gradient, and what was found of it."""

    task: str
    kind: str
    """`RAW`, or the ratio of the feedback."""
    seed: int
    step: int
    numel: int
    zero: float
    """The part of the entries that is zero."""
    kurtosis: float
    """Excess kurtosis of the entries that are not zero: 0 for a Gaussian, 3 for a double exponential."""
    qualities: list[Quality]
    layer: list[Quality]
    """The same for the largest parameter alone."""
    captured: list[float]
    """The part of the squared norm that the largest entries have, at `KEPT` parts of the entries."""
    tightest: float
    """Largest `||u - TopK(u)||^2 / ||u||^2 / (1 - k/d)^2` of all k in [1, d): at most 1 if the tighter bound holds."""
    below: bool
    """Whether the sorted squares, divided by the largest, lie below the line from 1 to 0."""
    convex: float
    """The part of `BLOCKS` steps along the sorted squares at which their curve is convex."""


def fit(x: Gradient, family: Family, k: float, stages: int) -> Fitted:
    """Fit a family as SIDCo does: first to all magnitudes that are not zero, then to excesses, with k entries as the aim."""
    fitted = Fitted(0.0, OPS.moments(x, 0.0, with_log=True), family.first)
    for remaining in range(stages - 1, 0, -1):
        assert family.tail is not None
        count = fitted.moments.count
        p = FIRST_RATIO if fitted.start == 0.0 else (k / count) ** (1.0 / (remaining + 1))
        start = fitted.threshold(p)
        tail = OPS.moments(x, start)
        if tail.count <= k or start <= 0.0:
            # Nothing is left to fit to, or the first stage has found no threshold.
            break
        fitted = Fitted(start, tail, family.tail)
    return fitted


def distance(fitted: Fitted, ascending: Gradient) -> float:
    """The largest difference between the fitted and the observed part of larger magnitudes, among those above `start`."""
    thresholds = np.array([fitted.threshold(float(p)) for p in SURVIVAL])
    larger = len(ascending) - np.searchsorted(ascending, thresholds.astype(np.float32), side="right")
    return float(np.abs(larger / fitted.moments.count - SURVIVAL).max())


def qualities(x: Gradient, ratios: list[float]) -> list[Quality]:
    """All fits to one gradient."""
    found = []
    ascending = np.sort(np.abs(x))
    for ratio in ratios:
        k = max(1, math.floor(ratio * len(x)))
        exact = float(ascending[-k - 1])
        for family in FAMILIES:
            for stages in STAGES if family.tail else STAGES[:1]:
                fitted = fit(x, family, k, stages)
                threshold = fitted.threshold(k / fitted.moments.count)
                count = float((ascending > threshold).sum()) / k
                error = threshold / exact - 1.0
                found.append(Quality(family.name, stages, ratio, count, error, distance(fitted, ascending)))
    return found


def contraction(x: Gradient) -> tuple[list[float], float, bool, float]:
    """`Snapshot.captured`, `.tightest`, `.below` and `.convex`."""
    squares = np.sort(np.square(x.astype(np.float64)))[::-1]
    size = len(squares)
    left = np.append(np.cumsum(squares[::-1])[::-1], 0.0) / squares.sum()
    fractions = np.arange(size) / size
    tightest = float((left[1:-1] / (1.0 - fractions[1:]) ** 2).max())
    below = bool((squares / squares[0] <= 1.0 - fractions).all())
    steps = np.diff([block.mean() for block in np.array_split(squares, BLOCKS)])
    convex = float((np.diff(steps) >= 0.0).mean())
    kept = [float(1.0 - left[min(size, round(part * size))]) for part in KEPT]
    return kept, tightest, below, convex
