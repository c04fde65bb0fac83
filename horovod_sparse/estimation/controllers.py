"""Controllers that adapt an algorithm to the counts it achieves: SIDCo's the number of stages, MiCRO's the threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Rule = Literal["paper", "robust", "fixed"]

PERIOD = 5
"""Q: steps over which the achieved count is averaged before the number of stages may change."""
TOLERANCE = 0.2
"""epsilon: relative error of the averaged count that is tolerated without a change."""
_STALE_AFTER = 20
"""After this many windows a measurement of another number of stages no longer counts (robust rule)."""
_LEAST_ROBUST = 3
"""The fewest stages that the robust rule goes down to."""
_FLOOR = 1e-6
"""Replaces an average of zero before its logarithm is taken."""
MOST_STAGES = 64
"""The most stages for any ratio: so many halvings leave nothing of the largest bucket."""


def most_stages(ratio: float) -> int:
    """Return M_max = ceil(ln(ratio)/ln(0.5)), within [1, 64]: the number of halvings that lead to `ratio`."""
    return min(max(1, math.ceil(math.log(ratio) / math.log(0.5))), MOST_STAGES)


class StageController(NamedTuple):
    """Adapts the number of stages M of one bucket (SIDCo, https://arxiv.org/abs/2101.10761).

    It depends on the distribution's tail whether a stage raises or lowers the count, hence the feedback.

    M may change every `PERIOD` steps; q is the mean of achieved/asked count over them. With `rule="paper"`, M decreases when
    `q > 1 + TOLERANCE` and increases when `q < 1 - TOLERANCE`, within [1, M_max]. `rule="robust"` stays within [3, M_max], as
    far as M_max allows: with fewer stages the last one has a quarter of the entries to fit, or all. It remembers |ln q| of
    each M that was tried. It tries the same direction first, then the other, and moves only to a neighbour that is untried,
    stale or was better. The paper's direction is wrong for heavy tails, where it pins M to 1. With `rule="fixed"`, M stays as
    it is, whatever state is loaded.
    """

    rule: Rule
    stages: int
    window: tuple[float, ...] = ()
    windows_seen: int = 0
    errors: tuple[tuple[int, float, int], ...] = ()
    """(M, |ln q|, the window in which it was measured), in ascending order."""

    def after(self, achieved: int, asked: int, ratio: float) -> StageController:
        """Return the controller after a step with these counts and this ratio."""
        if self.rule == "fixed":
            return self
        rule, stages, window, seen, known = self
        window = (*window, achieved / asked)
        if len(window) < PERIOD:
            return StageController(rule, stages, window, seen, known)
        quality, seen, most = sum(window) / PERIOD, seen + 1, most_stages(ratio)
        least = min(_LEAST_ROBUST, most) if rule == "robust" else 1
        errors = {m: (error, measured) for m, error, measured in known}
        errors[stages] = mine, _ = abs(math.log(max(quality, _FLOOR))), seen
        if abs(quality - 1.0) > TOLERANCE:
            direction = -1 if quality > 1.0 else 1
            for neighbour in (stages + direction, *([] if rule == "paper" else [stages - direction])):
                error, measured = errors.get(neighbour, (-1.0, seen))
                is_worth_trying = rule == "paper" or seen - measured > _STALE_AFTER or error < mine
                if min(least, stages) <= neighbour <= most and is_worth_trying:
                    stages = neighbour
                    break
            else:
                stages = min(stages, most)
        return StageController(rule, stages, (), seen, tuple((m, *of_m) for m, of_m in sorted(errors.items())))

    def state_dict(self) -> dict[str, object]:
        """Return plain numbers and lists, enough to continue identically."""
        return {
            "stages": self.stages,
            "window": [*self.window],
            "windows_seen": self.windows_seen,
            "errors": [[*one] for one in self.errors],
        }

    def loaded(self, state: Mapping[str, Any]) -> StageController:
        """Return the controller that continues from what `state_dict` returned. Raise ValueError for anything else."""
        try:
            stages, seen = state["stages"], state["windows_seen"]
            window = tuple(float(one) for one in state["window"])
            errors = tuple((int(m), float(error), int(measured)) for m, error, measured in state["errors"])
            numbers = [seen, *window, *(number for _, *of_m in errors for number in of_m)]
            fits = type(stages) is type(seen) is int and len(window) < PERIOD
            known = [m for m, *_ in errors]
            fits = fits and known == sorted({*known}) and all(1 <= m <= MOST_STAGES for m in (stages, *known))
            fits = fits and all(0.0 <= number < math.inf for number in numbers)
        except (KeyError, TypeError, ValueError, OverflowError):
            fits = False
        if not fits:
            raise ValueError(
                f"adaptive state must have stages in [1, {MOST_STAGES}], a window of at most {PERIOD - 1} numbers >= 0, "
                f"windows_seen >= 0 and errors, got {state}; another algorithm saved it, or it is damaged"
            )
        return StageController(self.rule, self.stages if self.rule == "fixed" else stages, window, seen, errors)


Scaling = Literal["two_sided", "paper"]

_FINE, _COARSE = 0.00125, 0.005
_BAND = 1.1
_GAIN = 0.02
_MOST_RATIO = 4.0
_REPAID = 0.1
"""Fraction of the excess that each step tries to compensate."""
MOST_EXCESS = 5.0


def next_threshold(scaling: Scaling, threshold: float, excess: float, count: int, k: int) -> tuple[float, float]:
    """Return MiCRO's next threshold (https://arxiv.org/abs/2310.00967) and excess, after all ranks selected `count` entries.

    With x = count/k, `scaling="paper"` multiplies the threshold by 1.005 if x > 1.1, by 1.00125 if 1/1.1 < x <= 1.1, and by
    0.995 below. Within the band it only rises.

    `scaling="two_sided"` multiplies it by `x^0.02`, where x is `count/k + 0.1 excess`, within [1/4, 4]. The excess is the sum
    of count/k - 1 over the steps, within [-5, 5]. Without it, the count would stay above k for as long as the residual grows.
    """
    x = count / k
    if scaling == "paper":
        return threshold * (1.0 + (_COARSE if x > _BAND else _FINE if x > 1.0 / _BAND else -_COARSE)), excess
    excess = min(max(excess + x - 1.0, -MOST_EXCESS), MOST_EXCESS)
    x += _REPAID * excess
    return threshold * min(max(x, 1.0 / _MOST_RATIO), _MOST_RATIO) ** _GAIN, excess
