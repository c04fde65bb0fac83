"""SIDCo: a threshold from a fitted distribution, refined in stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from horovod_sparse import fits
from horovod_sparse.algebra import FLOATS, Algebra
from horovod_sparse.compressors.base import ALONE, POSITIVE, BucketState, Compressor, Place, Settings, check_choice
from horovod_sparse.known import Known
from horovod_sparse.ops import Above, Array, Moments, Ops, Selection, Sums
from horovod_sparse.schedules import Schedule
from horovod_sparse.search import below_largest, search_threshold
from horovod_sparse.stages import StageController, most_stages

if TYPE_CHECKING:
    from typing_extensions import Unpack

Distribution = Literal["exponential", "gamma", "gpareto"]
Adapt = Literal["paper", "guarded", "robust"]

FIRST_RATIO = 0.25
"""delta_1: fraction of the entries that the first of several stages aims at."""
_FIRST_STAGES = 3
"""M to start from with stages="auto": under error feedback fewer starve (they underestimate a truncated bulk's tail)."""
_PAPER_ROOM = 24.0
"""Of a message, as a multiple of k: the most that was measured is 20, on the data of docs/estimation.md."""
TRUSTED = 2.0
"""An estimate that selects more than this many times, or less than one over this many times, k entries is replaced."""
SEARCH_TOLERANCE = 0.1
MOST_TAIL = 2.0 * FIRST_RATIO
"""A cut that leaves a larger part of the entries is none."""
_SPARE = 1.5
"""There is room for so many times the entries that a cut should leave, or that the last one has left."""
_MOST_LEFT = 4.0
"""A cut that leaves more than so many times the entries that it should leave was an accident."""
_MOST_AIM = 4.0
_AIM_GAIN = 0.1
"""How much of the relative error of a step's count the next step's aim makes good."""


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
        super().adopt(state)
        self.controller.load_state_dict(state)


class SIDCo(Compressor):
    """Sparsity-inducing distribution-based compression (https://arxiv.org/abs/2101.10761).

    Fits a distribution to the magnitudes and inverts its survival function at the ratio. With M > 1 stages the first
    aims at `delta_1 = 0.25` and each later one fits the excesses over the threshold so far, aiming at
    `r = (delta/delta_1)^(1/(M-1))` of them: peaks over threshold.

    `adapt="paper"` is the published estimator, whatever count it gives. Only cases that the paper leaves open are decided: the
    fit sees only non-zero entries (padding and dead units have no distribution), and if they are not more than k all are
    sent; a ratio of delta_1 or more takes one stage; a stage that leaves fewer than two entries is taken back; at least
    one entry is sent unless all are zero.

    The other values of `adapt` depart from the paper, each time for a measured failure. Both: the gamma fit inverts exactly
    instead of by its closed form; `stages="auto"` starts from 3, because one stage starves under error feedback; an estimate
    that is off by more than a factor 2 is replaced by a threshold found by counting, so that no bucket starves or floods
    while M adapts. "robust" alone: each later stage aims by the number of entries that are really left,
    `r_m = (k/n_m)^(1/(stages to go))`, so that an error of an earlier one is made good. And for speed: in most steps only the
    last stage is fitted, to the entries above a cut that the step before has put where stage M-1 would end; their moments are
    taken while the gradient is accumulated, so the stages cost next to nothing.

    Args:
        ratio: fraction of entries to send, in (0, 1], or a schedule.
        distribution: "exponential" (SIDCo-E), "gamma" (SIDCo-GP: gamma first, generalised Pareto later) or "gpareto"
            (SIDCo-P).
        stages: M, an int in [1, 64], or "auto" to let it follow the achieved count, per bucket.
        adapt: "paper": M starts from 1 and follows the paper's rule, every later stage has the same r, and the gamma fit is the
            paper's closed form. "guarded": the paper's r and rule for M, with the safeguards above. "robust": each later stage
            aims by the entries that are left, and M may also move against the paper's direction, which is wrong for heavy
            tails.
        others: those of `Compressor`. Unless `capacity` says otherwise, message room is 1.25 k, and with adapt="paper" 24 k, so
            that it does not hide what is selected.
    """

    default_capacity = 1.25
    needs_sums = True

    def __init__(
        self,
        ratio: float | Schedule,
        *,
        distribution: Distribution = "exponential",
        stages: int | Literal["auto"] = "auto",
        adapt: Adapt = "robust",
        **settings: Unpack[Settings],
    ) -> None:
        check_choice("adapt", adapt, ("paper", "guarded", "robust"))
        if adapt == "paper" and settings.get("capacity") is None:
            settings["capacity"] = _PAPER_ROOM
        super().__init__(ratio, **settings)
        check_choice("distribution", distribution, ("exponential", "gamma", "gpareto"))
        if stages != "auto" and (isinstance(stages, bool) or not isinstance(stages, int) or not 1 <= stages <= 64):
            raise ValueError(f"stages must be 'auto' or an int in [1, 64], got {stages!r}")
        self.distribution: Distribution = distribution
        self.stages: int | Literal["auto"] = stages
        self.adapt: Adapt = adapt

    def new_state(self, place: Place = ALONE) -> SIDCoState:
        most = most_stages(self.ratio_at(self.dense_steps))
        start = 1 if self.adapt == "paper" else _FIRST_STAGES
        first = min(start, most) if self.stages == "auto" else self.stages
        return SIDCoState(place, controller=StageController("robust" if self.adapt == "robust" else "paper", first))

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        assert isinstance(state, SIDCoState)
        state.stages = state.controller.stages if self.stages == "auto" else self.stages
        sums = ops.measure(x)
        if sums.count <= k:
            # There is room for everything that is not zero; nothing was estimated, so there is nothing to learn from.
            state.threshold = 0.0
            return ops.select_above(x, 0.0, capacity)
        aim = min(max(1, round(state.aim * k)), sums.count - 1)
        tail = self._tail(ops, x, state)
        narrowed = ops
        if tail is not None and aim < tail.count <= MOST_TAIL * sums.count:
            threshold, state.cut = last_stage(
                state.cut, tail, sums.count, sums.largest, aim, state.stages, self._tail_fit
            )
        else:
            threshold, state.cut, narrowed = self._all_stages(ops, x, sums, aim, state.stages)
        if state.stages > 1:
            aimed = tail_aim(sums.count, aim, state.stages)
            left = aimed if tail is None else min(max(tail.count, aimed), _MOST_LEFT * aimed)
            state.room = round(_SPARE * left)
        state.threshold = below_largest(sums.largest, threshold)
        selection = narrowed.select_above(x, state.threshold, capacity)
        if self.stages == "auto":
            state.controller.observe(selection.found, aim, most_stages(self.ratio_at(state.step)))
        found = selection.found
        trusted = self.adapt == "paper" or k / TRUSTED <= found <= k * TRUSTED
        if not trusted:
            threshold = search_threshold(ops, x, k, SEARCH_TOLERANCE, not_zero=sums.count, largest=sums.largest)
            state.threshold, state.cut = below_largest(sums.largest, threshold), math.inf
            selection = ops.select_above(x, state.threshold, capacity)
        if self.adapt == "robust":
            # By the estimate's own count, whatever replaced it, or the error that made it useless would grow.
            achieved = len(selection.indices) if trusted else found
            state.aim = next_aim(state.aim, achieved, k)
        return selection

    def _tail(self, ops: Ops, x: Array, state: SIDCoState) -> Moments | None:
        """Of the excesses over the cut, if there is one."""
        if self.adapt != "robust" or state.stages == 1 or state.cut == math.inf:
            return None
        return ops.moments(x, state.cut)

    def _all_stages(self, ops: Ops, x: Array, sums: Sums, k: int, stages: int) -> tuple[float, float, Ops]:
        """The threshold fitted to all k < sums.count non-zero entries, stage by stage, and the cut of the last stage.

        And verbs that know what is above the first stage's threshold.
        """
        whole, cut = sums.moments(), math.inf
        if self.distribution == "gamma":
            whole = ops.moments(x, 0.0, with_log=True)
        ratio = k / whole.count
        if stages == 1 or ratio >= FIRST_RATIO:
            return self._first_fit(whole, ratio), cut, ops
        threshold = self._first_fit(whole, FIRST_RATIO)
        # Later stages and the selection need to look only at what the first one left.
        left = ops.select_above(x, threshold, len(x)).indices
        narrowed = cast(Ops, Known(ops, x, sums, Above(threshold, left, x[left])))
        step_ratio = (ratio / FIRST_RATIO) ** (1.0 / (stages - 1))
        previous = 0.0
        for remaining in range(stages - 1, 0, -1):
            tail = narrowed.moments(x, threshold)
            if tail.count < 2:
                # Beyond the data: nothing is left to fit, the last threshold that left something is the better one.
                return previous, cut, narrowed
            if self.adapt == "robust":
                step_ratio, cut = (k / tail.count) ** (1.0 / remaining), threshold
            previous, threshold = threshold, max(threshold + self._tail_fit(tail, step_ratio), previous)
        return threshold, cut, narrowed

    def _first_fit(self, moments: Moments, ratio: float) -> float:
        if self.distribution == "gamma":
            return fits.gamma(moments.mean, moments.mean_log, ratio, closed_form=self.adapt == "paper")
        return self._tail_fit(moments, ratio)

    def _tail_fit(self, moments: Moments, ratio: float) -> float:
        if self.distribution == "exponential":
            return fits.exponential(moments.mean, ratio)
        return fits.generalized_pareto(moments.mean, moments.variance, ratio)


def last_stage(
    cut: float,
    tail: Moments,
    count: float,
    largest: float,
    k: float,
    stages: int,
    fit: Callable[[Moments, float], float],
    m: Algebra = FLOATS,
) -> tuple[float, float]:
    """The threshold fitted to the `tail` above a cut, and the next step's cut, which leaves what stage M-1 aims at.

    `count` entries are not zero, and k are wanted; infinity stands for no cut.
    """
    following = cut + fit(tail, tail_aim(count, k, stages) / tail.count)
    is_cut = m.minimum(following, largest - following) > 0.0
    return cut + fit(tail, k / tail.count), m.choose(is_cut, lambda: following, lambda: math.inf)


def tail_aim(count: float, k: float, stages: int) -> float:
    """How many of `count` entries stage M-1 aims at."""
    aim: float = count * FIRST_RATIO * (k / count / FIRST_RATIO) ** ((stages - 2) / (stages - 1))
    return aim


def next_aim(aim: float, achieved: float, k: int, m: Algebra = FLOATS) -> float:
    """What to aim at after `achieved` of k entries, as a multiple of k."""

    def within(x: float) -> float:
        return m.minimum(m.maximum(x, 1.0 / _MOST_AIM), _MOST_AIM)

    return within(aim * within(k / m.maximum(achieved, 1)) ** _AIM_GAIN)
