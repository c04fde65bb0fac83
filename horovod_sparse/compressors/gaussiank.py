"""Gaussian-k: a threshold from a normal distribution, corrected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal

from horovod_sparse.compressors.base import ALONE, POSITIVE, BucketState, Compressor, Place
from horovod_sparse.compressors.checks import check_choice
from horovod_sparse.estimation import fits
from horovod_sparse.ops.protocol import Array, Ops, Selection, Sums

CORRECTIONS = 2
"""The authors' loop corrects eta three times, but sends what it counted before the third correction."""
TOO_FEW, TOO_MANY = 2.0 / 3.0, 4.0 / 3.0
LOWER, RAISE = 0.5, 1.5
TOLERANCE = 0.1
RECENTRE = 0.05
_PAPER_SLACK = 48.0
"""Capacity of a message, as a multiple of k. The largest count measured is 41 k (docs/evidence/estimation.md)."""


@dataclass
class GaussianKState(BucketState):
    """`factor`, with refine="exact", is about the last threshold divided by the fitted one."""

    saved: ClassVar[tuple[str, ...]] = ("factor",)
    ranges = BucketState.ranges | {"factor": POSITIVE}
    factor: float = 1.0


@dataclass(eq=False, repr=False, kw_only=True)
class GaussianK(Compressor):
    """GaussianK-SGD (https://arxiv.org/abs/1911.08772): `eta = sigma z`, `z = -Phi^-1(delta/2)`, then corrections.

    sigma^2 is the mean of u^2 (a gradient's mean is negligible beside its deviation, and magnitudes are compared with
    zero), and the quantile is two-sided, since magnitudes are selected. delta is the ratio.

    Args:
        refine: "paper": eta is corrected at most twice. It is halved if fewer than 2k/3 entries exceed it, and multiplied by
            1.5 if more than 4k/3 do. On tails that are not normal the count ends far from k. "exact": eta is multiplied by a
            factor that earlier steps have found. If its count is more than 10 % off, the k largest entries are sent instead,
            and the next factor is the one that would have led to them.
        others: those of `Compressor`. Unless `slack` says otherwise, message capacity is 4k/3, with "paper" 48 k.
    """

    default_slack = TOO_MANY
    needs_sums = True

    refine: Literal["paper", "exact"] = "exact"

    def __post_init__(self) -> None:
        check_choice("refine", self.refine, ("paper", "exact"))
        if self.refine == "paper":
            self.take_slack(_PAPER_SLACK)
        super().__post_init__()

    def new_state(self, place: Place = ALONE) -> GaussianKState:
        return GaussianKState(place)

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        assert isinstance(state, GaussianKState)
        sums = ops.measure(x)
        if sums.count <= k:
            state.threshold = 0.0
            state.expect(0.0)
            return ops.select_above(x, 0.0, capacity)
        fitted = fit(sums, k, len(x))
        if self.refine == "paper":
            state.threshold = fits.below_largest(sums.largest, self._corrected(ops, x, k, fitted))
            state.expect(state.threshold)
            return ops.select_above(x, state.threshold, capacity)
        state.threshold = fits.below_largest(sums.largest, fitted * state.factor)
        selection = ops.select_above(x, state.threshold, capacity)
        found = selection.found
        if abs(found - k) > TOLERANCE * k:
            selection = ops.select_largest(x, k)
        self.learn(state, k, fitted, found, selection.smallest)
        state.expect(state.threshold)
        return selection

    def learn(self, state: GaussianKState, k: int, fitted: float, found: int, smallest: float) -> None:
        """Learn how many entries exceeded the threshold. If that is far from k, `smallest` is the k-th largest."""
        if abs(found - k) > TOLERANCE * k:
            state.threshold = fits.below_largest(smallest, math.inf)
            state.factor = (state.threshold / fitted if fitted > 0.0 else 0.0) or 1.0
        else:
            # The count is accepted, but the next threshold is a little nearer to k.
            state.factor *= (found / k) ** RECENTRE

    @staticmethod
    def _corrected(ops: Ops, x: Array, k: int, threshold: float) -> float:
        for _ in range(CORRECTIONS):
            count = ops.measure(x, threshold).count
            if count < TOO_FEW * k:
                threshold *= LOWER
            elif count > TOO_MANY * k:
                threshold *= RAISE
            else:
                break
        return threshold


def fit(whole: Sums, k: float, numel: float) -> float:
    """Return eta = sigma z, from the moments of all non-zero entries."""
    mean_square = whole.variance + whole.mean * whole.mean
    # Where float64 does not hold the mean square: a normal distribution has the mean magnitude sigma sqrt(2/pi).
    held = fits.is_held(mean_square)
    deviation = math.sqrt(mean_square) if held else whole.mean * math.sqrt(math.pi / 2)
    return deviation * math.sqrt(whole.count / numel) * -NormalDist().inv_cdf(k / numel / 2)
