"""SIDCo: a threshold from a fitted distribution, refined in stages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from horovod_sparse.compressors.base import ALONE, POSITIVE, BucketState, Compressor, Place
from horovod_sparse.compressors.checks import check_choice
from horovod_sparse.estimation import fits
from horovod_sparse.estimation.controllers import StageController, most_stages
from horovod_sparse.ops.cached import narrow
from horovod_sparse.ops.protocol import EXTENT, SUMS, Array, Hints, Ops, Selection, Sums

Distribution = Literal["exponential", "gamma", "gpareto"]
Adapt = Literal["paper", "robust"]

FIRST_RATIO = 0.25
"""delta_1: fraction of the entries that the first of several stages aims at."""
_FIRST_STAGES = 3
"""M to start from. Under error feedback fewer stages starve the bucket: they underestimate a truncated bulk's tail."""
_PAPER_SLACK = 24.0
"""Capacity of a message, as a multiple of k. The largest count measured is 20 k (docs/evidence/estimation.md)."""
TRUSTED = 2.0
"""The k largest entries are sent instead if an estimate selects more than `TRUSTED` k, or fewer than k / `TRUSTED`."""
MOST_TAIL = 2.0 * FIRST_RATIO
"""A cut that leaves more than this fraction of the non-zero entries is ignored."""
_SAMPLE = 2**15
"""How many entries a sample has that gives the next cut."""
_MOST_AIM = 16.0
_AIM_GAIN, _FAR_GAIN = 0.1, 0.5
"""The power of k/count that the next step's aim is multiplied by: the second if the two differ by more than `_FAR`."""
_FAR = math.exp(0.2)
"""A factor. So much is hardly chance where k is 100 or more; the gradients have changed."""


@dataclass
class SIDCoState(BucketState):
    """The stage controller of one bucket."""

    saved: ClassVar[tuple[str, ...]] = ("aim", "cut")
    ranges = BucketState.ranges | {"aim": (1.0 / _MOST_AIM, _MOST_AIM), "cut": (POSITIVE[0], math.inf)}
    controller: StageController = field(default_factory=lambda: StageController("paper", 1))

    aim: float = 1.0
    """Entries to aim at, as a multiple of k (adapt="robust")."""

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | self.controller.state_dict()

    def adopt(self, state: Mapping[str, Any]) -> None:
        # The controller checks its part of the state, and may refuse it: then nothing else must have changed.
        self.controller = self.controller.loaded(state)
        super().adopt(state)


@dataclass(eq=False, repr=False, kw_only=True)
class SIDCo(Compressor):
    """Sparsity-inducing distribution-based compression (https://arxiv.org/abs/2101.10761).

    Fits a distribution to the magnitudes and inverts its survival function at the ratio. With M > 1 stages the first
    aims at `delta_1 = 0.25`. Each later stage fits the excesses over the threshold so far (peaks over threshold), and aims
    at `r = (delta/delta_1)^(1/(M-1))` of them.

    `adapt="paper"` is the published estimator, whatever count it gives. It adds rules only for cases that the paper leaves
    open. The fit sees only non-zero entries (padding and dead units have no distribution). If at most k entries are not zero,
    all of them are sent. A ratio of delta_1 or more takes one stage. A stage that leaves fewer than two entries is undone.
    At least one entry is sent unless all are zero.

    `adapt="robust"` departs from the paper, each time because of a measured failure. The gamma fit is inverted exactly.
    `stages="auto"` starts from 3, because one stage starves under error feedback. Where an estimate is off by more than a
    factor 2, the k largest entries are sent. Each later stage computes its aim from the number of entries that are really
    left, `r_m = (k/n_m)^(1/(stages to go))`. For speed, most steps fit only the last stage: to the entries above a cut,
    which the previous step placed where stage M-1 would end. Their moments are taken while the gradient is accumulated. Where
    the cut leaves too few or too many, the k largest entries are sent, and a sample places the next one.

    Args:
        distribution: "exponential" (SIDCo-E), "gamma" (SIDCo-GP: gamma first, generalised Pareto later) or "gpareto"
            (SIDCo-P).
        stages: M, an int in [1, 64], or "auto" to let M follow the achieved count, per bucket.
        adapt: "paper" or "robust", as above. With "robust" M may also move against the paper's direction, and stays at 3 or
            more as long as the ratio allows so many.
        others: those of `Compressor`. Unless `slack` says otherwise, message capacity is 1.25 k; 24 k with adapt="paper".
    """

    default_slack = 1.25

    distribution: Distribution = "exponential"
    stages: int | Literal["auto"] = "auto"
    adapt: Adapt = "robust"

    def __post_init__(self) -> None:
        check_choice("adapt", self.adapt, ("paper", "robust"))
        check_choice("distribution", self.distribution, ("exponential", "gamma", "gpareto"))
        if self.stages != "auto" and (type(self.stages) is not int or not 1 <= self.stages <= 64):
            raise ValueError(f"stages must be 'auto' or an int in [1, 64], got {self.stages!r}")
        if self.adapt == "paper":
            self.take_slack(_PAPER_SLACK)
        super().__post_init__()

    def new_state(self, place: Place = ALONE) -> SIDCoState:
        most = most_stages(self.schedule.final if place.ratio is None else place.ratio)
        start = 1 if self.adapt == "paper" else _FIRST_STAGES
        auto = StageController(self.adapt, min(start, most))
        return SIDCoState(place, controller=auto if self.stages == "auto" else StageController("fixed", self.stages))

    def hints(self, state: BucketState, room: int) -> Hints:
        # With a cut, only the entries above it are fitted.
        return Hints(state.cut, room, EXTENT if state.cut < math.inf else SUMS)

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        assert isinstance(state, SIDCoState)
        state.stages = state.controller.stages
        has_cut = self.adapt == "robust" and state.stages > 1 and state.cut < math.inf
        sums = ops.extent(x) if has_cut else ops.measure(x)
        if sums.count <= k:
            # There is room for all non-zero entries. Nothing was estimated, so there is nothing to learn from.
            state.threshold = 0.0
            return ops.select_above(x, 0.0, capacity)
        aim = min(max(1, round(state.aim * k)), sums.count - 1)
        selection = self._estimate(ops, x, sums, aim, capacity, state, has_cut=has_cut)
        if selection is not None:
            self.learn(state, k, len(x), aim, selection.found)
        if selection is None or (self.adapt == "robust" and not k / TRUSTED <= selection.found <= k * TRUSTED):
            selection = ops.select_largest(x, k)
            state.threshold = fits.below_largest(selection.smallest, math.inf)
            state.cut = self._sampled_cut(ops, x, sums, aim, state.stages)
        return selection

    def _estimate(
        self, ops: Ops, x: Array, sums: Sums, aim: int, capacity: int, state: SIDCoState, *, has_cut: bool
    ) -> Selection | None:
        """Select what exceeds a fitted threshold; None if too few or too many exceed the cut to fit one."""
        if has_cut:
            tail = ops.measure(x, state.cut)
            if not aim < tail.count <= MOST_TAIL * sums.count:
                return None
            threshold, state.cut = self.last_stage(state.cut, tail, sums.count, sums.largest, aim, state.stages)
        else:
            threshold, state.cut, ops = self._all_stages(ops, x, sums, aim, state.stages)
        state.threshold = fits.below_largest(sums.largest, threshold)
        return ops.select_above(x, state.threshold, capacity)

    @staticmethod
    def _sampled_cut(ops: Ops, x: Array, sums: Sums, aim: int, stages: int) -> float:
        """Return the next step's cut where no fit tells it; infinity stands for no cut."""
        left = aim if stages == 1 else tail_aim(sums.count, aim, stages)
        if left <= aim:
            return math.inf
        stride = len(x) // _SAMPLE | 1
        cut = ops.sampled_largest(x, 0, stride, max(1, round(left / stride)))
        return fits.below_largest(sums.largest, cut) or math.inf

    # --- what the host and a device have in common ---

    def last_stage(
        self, cut: float, tail: Sums, count: float, largest: float, aim: float, stages: int
    ) -> tuple[float, float]:
        """Return the threshold fitted to the `tail` above a cut, and the next step's cut; infinity stands for no cut.

        The next cut leaves as many of `count` entries that are not zero as stage M-1 aims at.
        """
        following = cut + self._tail_fit(tail, tail_aim(count, aim, stages) / tail.count)
        return cut + self._tail_fit(tail, aim / tail.count), following if 0.0 < following < largest else math.inf

    def learn(self, state: SIDCoState, k: int, numel: int, aim: int, found: int) -> None:
        """Learn from an estimate that `found` of `numel` entries exceeded, also if it is not used: its error would grow."""
        state.controller = state.controller.after(found, aim, k / numel)
        if self.adapt == "robust":
            quotient = min(max(k / max(found, 1), 1.0 / TRUSTED), TRUSTED)
            power = _AIM_GAIN if 1.0 / _FAR <= quotient <= _FAR else _FAR_GAIN
            state.aim = min(max(state.aim * quotient**power, 1.0 / _MOST_AIM), _MOST_AIM)

    def _all_stages(self, ops: Ops, x: Array, sums: Sums, k: int, stages: int) -> tuple[float, float, Ops]:
        """Return the threshold fitted to all non-zero entries stage by stage, the cut of the last stage, and operations.

        There must be more than k non-zero entries (k < sums.count). With several stages, the operations know what is above
        the first stage's threshold. With adapt="robust", a stage that leaves no more than k entries is the last, because a
        ratio above 1 would extrapolate below the data: of its threshold and the one before, that counts whose number of
        entries is off by the smaller factor.
        """
        whole, cut = sums, math.inf
        if self.distribution == "gamma":
            whole = ops.measure(x, 0.0, with_log=True)
        ratio = k / whole.count
        if stages == 1 or ratio >= FIRST_RATIO:
            return self._first_fit(whole, ratio), cut, ops
        threshold = self._first_fit(whole, FIRST_RATIO)
        # Later stages and the selection need to look only at the entries that the first stage left.
        narrowed = narrow(ops, x, threshold)
        step_ratio = (ratio / FIRST_RATIO) ** (1.0 / (stages - 1))
        previous, before = 0.0, whole.count
        for remaining in range(stages - 1, 0, -1):
            tail = narrowed.measure(x, threshold)
            if self.adapt == "robust":
                if tail.count <= k:
                    is_nearer = before * tail.count >= k * k
                    return threshold if is_nearer else previous, cut, narrowed
                step_ratio, cut = (k / tail.count) ** (1.0 / remaining), threshold
            elif tail.count < 2:
                # The threshold is beyond the data: nothing is left to fit. The last threshold that left entries is better.
                return previous, cut, narrowed
            previous, before, threshold = threshold, tail.count, threshold + self._tail_fit(tail, step_ratio)
        return threshold, cut, narrowed

    def _first_fit(self, sums: Sums, ratio: float) -> float:
        if self.distribution == "gamma":
            return fits.gamma(sums.mean, sums.mean_log, ratio, closed_form=self.adapt == "paper")
        return self._tail_fit(sums, ratio)

    def _tail_fit(self, sums: Sums, ratio: float) -> float:
        mean = sums.total / sums.count
        if self.distribution == "exponential":
            return fits.exponential(mean, ratio)
        return fits.generalized_pareto(mean, sums.variance, ratio)


def tail_aim(count: float, k: float, stages: int) -> float:
    """Return how many of `count` entries stage M-1 aims at."""
    aim: float = count * FIRST_RATIO * (k / count / FIRST_RATIO) ** ((stages - 2) / (stages - 1))
    return aim
