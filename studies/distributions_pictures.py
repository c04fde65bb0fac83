"""Pictures of what `distributions.py` has found: shapes, quantiles, counts while training goes on, and what top-k captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from distributions_fits import FAMILIES, KEPT, RAW, SURVIVAL, Gradient, Quality, Snapshot, fit
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

SHAPES, QUANTILES, COUNTS, CAPTURED = (
    f"distributions-{name}.png" for name in ("shapes", "quantiles", "counts", "captured")
)
DRAWN = [family for family in FAMILIES if "closed form" not in family.name]
COLORS = {"Gaussian": "#7a7a7a", "exponential": "#3b7dd8", "gamma": "#009e73", "gpareto": "#c2410c"}
MAGNITUDE, FITTED = "magnitude / mean magnitude", "fitted quantile / mean magnitude"
Where = tuple[str, str]
"""(task, kind)."""


def title(kind: str) -> str:
    """A kind of gradient, in words."""
    return kind if kind == RAW else f"with feedback, ratio {kind}"


def draw(snapshots: Sequence[Snapshot], last: Mapping[Where, Gradient], folder: Path) -> None:
    """All pictures. `last` are the last gradients that were taken, one of each task and kind."""

    def counts(axes: Axes, where: Where) -> None:
        _counts(axes, [one for one in snapshots if (one.task, one.kind) == where])

    places = list(last)
    _grid(places, folder / SHAPES, lambda axes, where: _shape(axes, last[where]), MAGNITUDE, "density")
    _grid(places, folder / QUANTILES, lambda axes, where: _quantiles(axes, last[where]), FITTED, "observed quantile")
    _grid(places, folder / COUNTS, counts, "step", "count / k")
    _captured(snapshots, folder / CAPTURED)


def _grid(places: Sequence[Where], file: Path, panel: Callable[[Axes, Where], None], below: str, beside: str) -> None:
    """One panel for each task and kind."""
    tasks, kinds = (list(dict.fromkeys(names)) for names in zip(*places, strict=True))
    figure = Figure(figsize=(3.6 * len(kinds), 2.7 * len(tasks)), layout="constrained")
    axes = figure.subplots(len(tasks), len(kinds), squeeze=False)
    for row, task in zip(axes, tasks, strict=True):
        for one, kind in zip(row, kinds, strict=True):
            panel(one, (task, kind))
            one.set_title(f"{task}, {title(kind)}", fontsize=8)
            one.tick_params(labelsize=7)
            one.grid(color="#e5e5e5", linewidth=0.6)
        row[0].set_ylabel(beside, fontsize=8)
    for one in axes[-1]:
        one.set_xlabel(below, fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(file, dpi=85)


def _shape(axes: Axes, x: Gradient) -> None:
    """A histogram, and the densities of the fits."""
    magnitudes = np.abs(x[x != 0])
    mean, most = float(magnitudes.mean()), float(np.quantile(magnitudes, 0.9998))
    axes.hist(magnitudes[magnitudes <= most] / mean, bins=80, density=True, color="#dddddd")
    for family in DRAWN:
        fitted = fit(x, family, 1, 1)
        thresholds = np.array([fitted.threshold(float(p)) for p in SURVIVAL]) / mean
        # The density is the slope of the distribution function, whose inverse the library's fits are.
        axes.plot(
            (thresholds[1:] + thresholds[:-1]) / 2,
            -np.diff(SURVIVAL) / np.diff(thresholds),
            color=COLORS[family.name], linewidth=1.0, label=family.name,
        )  # fmt: skip
    axes.set(yscale="log", xlim=(0, most / mean), ylim=(2e-5, 20))


def _quantiles(axes: Axes, x: Gradient) -> None:
    """Observed against fitted quantiles: all magnitudes, and (dashed) the excesses that the second stage is fitted to."""
    ascending = np.sort(np.abs(x))
    mean = float(ascending[ascending > 0].mean())
    for family in DRAWN:
        for stages in (1, 2) if family.tail else (1,):
            fitted = fit(x, family, 1, stages)
            chosen = SURVIVAL[SURVIVAL * fitted.moments.count >= 1.0]
            observed = ascending[len(ascending) - 1 - (chosen * fitted.moments.count).astype(int)]
            thresholds = [fitted.threshold(float(p)) / mean for p in chosen]
            dashed = stages > 1
            # The tail of gamma is gpareto's, from nearly the same start.
            if not (dashed and family.name == "gamma"):
                axes.plot(
                    thresholds, observed / mean, "--" if dashed else "-", color=COLORS[family.name], linewidth=1.1,
                    label=family.name + ", tail" * dashed,
                )  # fmt: skip
    most = float(ascending[-1]) / mean
    axes.plot([0.05, most], [0.05, most], color="#000000", linewidth=0.6)
    axes.set(xscale="log", yscale="log", xlim=(0.1, 2 * most), ylim=(0.1, 2 * most))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _counts(axes: Axes, snapshots: Sequence[Snapshot]) -> None:
    """Achieved / asked count of each fit at the steps that were looked at; the least ratio, the first seed."""
    ratio = min(one.ratio for one in snapshots[0].qualities)
    chosen = [one for one in snapshots if one.seed == 0]
    for family in DRAWN:
        for stages, line in ((1, "-"), (3, "--")) if family.tail else ((1, "-"),):

            def is_drawn(one: Quality, name: str = family.name, stages: int = stages) -> bool:
                return (one.family, one.stages, one.ratio) == (name, stages, ratio)

            # An empty selection has no logarithm.
            counts = [max(next(filter(is_drawn, one.qualities)).count, 0.01) for one in chosen]
            axes.plot(
                [one.step for one in chosen], counts, line, color=COLORS[family.name], linewidth=1.1,
                label=family.name if stages == 1 else f"{family.name}, 3 stages",
            )  # fmt: skip
    axes.axhspan(0.8, 1.25, color="#dfeedd", zorder=0)
    axes.set(xscale="log", yscale="log", ylim=(0.009, 30))


def _captured(snapshots: Sequence[Snapshot], file: Path) -> None:
    """What the largest entries have of the squared norm: medians of each task and kind, and the two bounds."""
    tasks = list(dict.fromkeys(one.task for one in snapshots))
    figure = Figure(figsize=(4.0 * len(tasks), 3.6), layout="constrained")
    axes = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for one, task in zip(axes, tasks, strict=True):
        kinds = dict.fromkeys(each.kind for each in snapshots if each.task == task)
        for kind, color in zip(kinds, ("#7a7a7a", "#3b7dd8", "#c2410c", "#009e73"), strict=False):
            curves = np.array([each.captured for each in snapshots if (each.task, each.kind) == (task, kind)])
            one.plot(KEPT, np.median(curves, axis=0), color=color, linewidth=1.4, label=title(kind))
            one.fill_between(KEPT, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.15, linewidth=0)
        one.plot(KEPT, 1 - (1 - KEPT) ** 2, "k--", linewidth=0.9, label="1 - (1 - k/d)²")
        one.plot(KEPT, KEPT, "k:", linewidth=0.9, label="k/d")
        one.set(xscale="log", yscale="log", xlabel="k/d", ylim=(8e-5, 1.3))
        one.set_title(task, fontsize=9)
        one.grid(color="#e5e5e5", linewidth=0.6)
    axes[0].set_ylabel("part of ||u||² in the k largest entries")
    axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(file, dpi=90)
