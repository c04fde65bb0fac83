"""Tables and page of what `distributions.py` has found; every figure in them is one of its measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distributions_fits import BLOCKS, FAMILIES, KEPT, RAW, STAGES, Quality, Snapshot
from distributions_pictures import CAPTURED, COUNTS, QUANTILES, SHAPES, title
from markdown import table

CLOSE = 1.25
"""A count is called close to k if it is within this factor of it."""
PARTS = (0.001, 0.01, 0.1)
"""k/d of the table of what top-k leaves."""
NAMES = [family.name for family in FAMILIES]
SHAPED = [name for name in NAMES if "closed form" not in name]
"""Those that are distributions; the closed form is only an approximation of gamma's quantiles."""


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median, least and largest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def _groups(snapshots: Sequence[Snapshot]) -> dict[tuple[str, str], list[Snapshot]]:
    """By task and kind."""
    groups: dict[tuple[str, str], list[Snapshot]] = {}
    for one in snapshots:
        groups.setdefault((one.task, one.kind), []).append(one)
    return groups


def chosen(qualities: Iterable[Quality], family: str, stages: int, ratio: float) -> list[Quality]:
    return [one for one in qualities if (one.family, one.stages, one.ratio) == (family, stages, ratio)]


def _distances(group: Sequence[Snapshot], family: str, stages: int, layer: bool = False) -> list[float]:
    """Of each snapshot. Where the last stage starts does not depend on the ratio with one stage or two."""
    found = []
    for one in group:
        qualities = one.layer if layer else one.qualities
        found += [each.distance for each in chosen(qualities, family, stages, qualities[0].ratio)]
    return found


def distance_table(snapshots: Sequence[Snapshot]) -> str:
    rows = []
    for (task, kind), group in _groups(snapshots).items():
        for what, stages, layer in (("all", 1, False), ("largest parameter", 1, True), ("excesses", 2, False)):
            found = [_distances(group, name, stages, layer) for name in SHAPED]
            rows.append([task, title(kind), what, *(spread(values) if values else "–" for values in found)])
    return table(["model", "gradient", "magnitudes", *SHAPED], rows, words=3)


def nearest(snapshots: Sequence[Snapshot], stages: int) -> str:
    """How often each family has the smallest distance."""
    groups = _groups(snapshots)
    wins = dict.fromkeys(SHAPED, 0)
    for group in groups.values():
        for one in group:
            found = {name: _distances([one], name, stages) for name in SHAPED}
            wins[min((name for name in SHAPED if found[name]), key=lambda name: found[name][0])] += 1
    return ", ".join(f"{name} {count}" for name, count in wins.items() if count)


def shape_table(snapshots: Sequence[Snapshot]) -> str:
    rows = [
        [task, title(kind), f"{group[0].numel:,}", spread([100 * one.zero for one in group], 1),
         spread([one.kurtosis for one in group], 1)]
        for (task, kind), group in _groups(snapshots).items()
    ]  # fmt: skip
    return table(["model", "gradient", "entries", "zeros, %", "excess kurtosis"], rows, words=2)


def _ratios(group: Sequence[Snapshot]) -> list[float]:
    return list(dict.fromkeys(one.ratio for one in group[0].qualities))


def count_table(snapshots: Sequence[Snapshot]) -> str:
    rows = []
    for (task, kind), group in _groups(snapshots).items():
        for ratio in _ratios(group):
            for stages in STAGES:
                cells = []
                for name in NAMES:
                    found = [each for one in group for each in chosen(one.qualities, name, stages, ratio)]
                    error = 100 * statistics.median(each.error for each in found) if found else 0.0
                    cells.append(f"{spread([each.count for each in found], 2)}, {error:+.0f} %" if found else "–")
                rows.append([task, title(kind), f"{ratio:g}", str(stages), *cells])
    return table(["model", "gradient", "asked ratio", "stages", *NAMES], rows, words=2)


def close(snapshots: Sequence[Snapshot], name: str, stages: int, raw: bool) -> tuple[int, int]:
    """How many counts are within `CLOSE` of k, and of how many."""
    counts = [
        each.count
        for one in snapshots
        if (one.kind == RAW) == raw
        for each in one.qualities
        if (each.family, each.stages) == (name, stages)
    ]
    return sum(1 / CLOSE <= count <= CLOSE for count in counts), len(counts)


def close_table(snapshots: Sequence[Snapshot]) -> str:
    def cells(raw: bool) -> list[list[str]]:
        found: list[list[str]] = []
        for stages in STAGES:
            each = [close(snapshots, name, stages, raw) for name in NAMES]
            found.append([f"{good} of {total}" if total else "–" for good, total in each])
        return found

    rows = [
        [words, str(stages), *row]
        for words, raw in ((RAW, True), ("with feedback", False))
        for stages, row in zip(STAGES, cells(raw), strict=True)
    ]
    return table(["gradient", "stages", *NAMES], rows)


def contraction_table(snapshots: Sequence[Snapshot]) -> str:
    """What top-k leaves of the squared norm, at some parts of the entries."""
    rows = []
    for (task, kind), group in _groups(snapshots).items():
        cells = [spread([1.0 - one.captured[_kept_at(part)] for one in group], 4) for part in PARTS]
        below = f"{sum(one.below for one in group)} of {len(group)}"
        rows.append([task, title(kind), *cells, below, spread([100 * one.convex for one in group], 0)])
    for name, power in (("1 - k/d", 1), ("(1 - k/d)²", 2)):
        rows.append([name, "", *(f"{(1.0 - part) ** power:.4f}" for part in PARTS), "", ""])
    head = ["model", "gradient", *(f"k/d = {part:g}" for part in PARTS), "below the line"]
    return table([*head, f"convex, % of {BLOCKS} steps"], rows, words=2)


def _kept_at(part: float) -> int:
    return min(range(len(KEPT)), key=lambda number: abs(math.log(KEPT[number] / part)))


def summary_table(snapshots: Sequence[Snapshot]) -> str:
    """The distances and the counts of all models and ratios together."""
    rows = []
    groups = [[one for one in snapshots if (one.kind == RAW) == raw] for raw in (True, False)]
    for what, stages, names in (("all magnitudes", 1, SHAPED), ("the excesses", 2, ("exponential", "gpareto"))):
        for name in names:
            cells = [spread(_distances(group, name, stages)) for group in groups]
            rows.append([f"distance of {what} from {name}", *cells])
    for name in NAMES:
        for stages in STAGES[:: len(STAGES) - 1]:
            found = [close(snapshots, name, stages, raw) for raw in (True, False)]
            if found[0][1]:
                cells = [f"{good} of {total}" for good, total in found]
                rows.append([f"count within a factor {CLOSE:g} of k: {name}, stages: {stages}", *cells])
    return table(["", RAW, "with feedback"], rows)


def findings(snapshots: Sequence[Snapshot]) -> str:
    """What the tables say, in sentences; each figure is computed."""
    total, level = len(snapshots), 1.36 / math.sqrt(min(one.numel for one in snapshots))
    held = sum(one.tightest <= 1.0 for one in snapshots)
    tails = [spread([one.kurtosis for one in snapshots if (one.kind == RAW) == raw], 1) for raw in (True, False)]
    settled = [one for one in snapshots if one.kind != RAW and one.step >= 1.0 / float(one.kind)]
    late = ", ".join(
        f"{name} {good} of {asked}"
        for name in ("exponential", "gamma", "gpareto")
        for good, asked in [close(settled, name, STAGES[-1], raw=False)]
    )
    return f"""- **Gaussian** (Gaussian-k): the gradients have one peak, at zero, but not a Gaussian's tails. A Gaussian's
  excess kurtosis is 0. That of the gradient alone is {tails[0]}, with feedback {tails[1]}.
  The threshold of the fit is seldom near the right one. Gaussian-k corrects it.
- **Double exponential, gamma, generalised Pareto** (SIDCo): of {total} gradients, the nearest fit to all magnitudes is
  {nearest(snapshots, 1)}. These fits are near in the bulk, but the difference is no accident:
  a sample of the fitted distribution would be within {level:.3f} in 95 of 100 cases.
- **Tails, gradient alone**: a single fit misses the right threshold, as it describes the bulk. The excesses over the first
  stage's threshold are near to a generalised Pareto distribution, as SIDCo supposes, and three stages mostly find k.
- **Tails, with feedback**: the magnitudes end at about the threshold, since each step takes away what exceeds it, and no
  family has such an end. A fit to all magnitudes mostly puts the threshold beyond it, and selects next to nothing. Three
  stages help, since they fit what is next to the end. After the first 1/ratio steps they are within a factor {CLOSE:g} of
  k this often: {late}. So fits alone do not hold the count.
  `SIDCo` also learns from the count of the step before ([achieved counts](estimation.md)).
- **The bound `(1 - k/d)²`** on what top-k leaves (Gaussian-k) holds on {held} of {total} gradients, for every k."""


def page(snapshots: Sequence[Snapshot], conditions: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    parts = " and ".join(dict.fromkeys(one.kind for one in snapshots if one.kind != RAW))
    return f"""# Distributions of gradients in training

    {conditions["command"]}

This page is written by this command; every figure is measured by it. Processor: {conditions["processor"]}, one thread;
torch {conditions["torch"]}; {conditions["processor_seconds"]:.0f} s of processor time.

SIDCo ([arXiv 2101.10761](https://arxiv.org/abs/2101.10761)) takes gradients for double exponential, gamma or
generalised Pareto, and Gaussian-k ([arXiv 1911.08772](https://arxiv.org/abs/1911.08772)) for Gaussian, also with error
feedback. This page looks at how near they are while three models are trained.

- **Training**: three examples' models, small, on two workers with SGD and momentum, {conditions["steps"]} steps,
  {conditions["seeds"]} seeds each. All parameters of 256 entries or more are one bucket. Figures are median
  (least–largest) over the seeds and {conditions["points"]} steps, which are evenly spaced on a logarithmic scale from
  step {conditions["first"]} on.
- **Gradient alone**: the first worker's gradient in dense training. **With feedback**: its residual and gradient
  together, in training with `TopK` at the ratio, {parts}, just before the selection.
- **Fits**: those of `horovod_sparse/estimation/fits.py`, and Gaussian-k's, to all magnitudes that are not zero (one
  stage). Two stages fit the excesses over the first stage's threshold for a quarter of the entries; three stages move
  it once more, towards k. After "gamma" the excesses are fitted by "gpareto". "Closed form" is the published inverse of
  gamma, "gamma" the exact one.
- **Distance**: the largest difference between the fitted and the observed part of larger magnitudes (Kolmogorov and
  Smirnov's).

## What holds and what does not

{summary_table(snapshots)}

{findings(snapshots)}

## Shapes

{shape_table(snapshots)}

The magnitudes of the last gradient of the first seed, and the densities of the fits:

![Histograms of magnitudes with fitted densities]({SHAPES})

The same gradients: observed against fitted quantiles, with all magnitudes (lines) and from the first stage's threshold
on (dashes). On the black line, fit and data agree:

![Observed against fitted quantiles]({QUANTILES})

Distance between the fits and the data:

{distance_table(snapshots)}

## Thresholds

How often the fitted threshold selects a count within a factor {CLOSE:g} of k:

{close_table(snapshots)}

Achieved / asked count in training, first seed, ratio 0.001 where there is no feedback. Below 0.01 it is drawn at 0.01;
the band is a factor {CLOSE:g}:

![Achieved / asked count of each fit while training goes on]({COUNTS})

Achieved / asked count, median (least–largest), and the median error of the threshold:

{count_table(snapshots)}

## What top-k leaves

Gaussian-k's Theorem 1 says that `||u - TopK(u)||² / ||u||²` is at most `(1 - k/d)²`, not just `1 - k/d`, if the curve
of the sorted squares (divided by the largest) is convex and below the line from 1 to 0. The largest entries have more
of the squared norm than both bounds ask for:

![Part of the squared norm in the largest entries, and the two bounds]({CAPTURED})

What is left at some k, and how far the theorem's conditions are met. The curve is looked at in {BLOCKS} blocks of as
many entries each:

{contraction_table(snapshots)}

`tests/test_contraction.py` has gradients that meet the conditions, for which the tighter bound holds, and gradients that
do not, for which it fails. It is not enough that the curve is below the line.
"""
