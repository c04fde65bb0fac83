"""Tables, picture and page of what `estimation.py` has measured; every figure in them is one of the measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import markdown
from estimation_data import CHARLM_LAYERS, CHARLM_WIDTH, KINDS, LSTM_WIDTH, MOSTLY_ZERO, OUTLIER, RECORDED

from horovod_sparse.compressors.base import MIN_NUMEL

CLOSED, RAW = "feedback", "raw"
TOLERANCE = 0.1
PERCENT = f"{TOLERANCE * 100:g} %"

COLORS = ("#000000", "#e69f00", "#7a7a7a", "#3b7dd8", "#56b4e9", "#009e73", "#c2410c", "#cc79a7", "#8b1a1a", "#b08d57")
MARKERS = ("D", "^", "s", "o", "o", "o", "o", "o", "v", "x")


@dataclass(frozen=True)
class Result:
    """One compressor on one kind of data: achieved/asked count over the counted steps, and the error beside top-k's."""

    compressor: str
    data: str
    ratio: float
    mode: str
    held: bool
    room: float
    """Of a message, as a multiple of the asked count."""
    numel: int
    k: int
    mean: float
    p5: float
    p95: float
    error: float | None
    """None where top-k leaves nothing behind."""
    seeds: list[float]
    """The mean of each seed."""


def unique(values: Iterable[Any]) -> list[Any]:
    """The values in the order in which they first occur."""
    return list(dict.fromkeys(values))


def outside(results: Sequence[Result]) -> list[Result]:
    """Those whose mean count with feedback should be within the tolerance and is not."""
    held = [result for result in results if result.held and result.mode == CLOSED and result.data != MOSTLY_ZERO]
    return [result for result in held if abs(result.mean - 1.0) > TOLERANCE]


def verdict(results: Sequence[Result]) -> str:
    """Whether the compressors that are held to it achieve their count."""
    names = "; ".join(unique(result.compressor for result in results if result.held))
    rule = f'Mean count with feedback within {PERCENT} of k on all data but "{MOSTLY_ZERO}", asked of {names}: '
    failed = [
        f"- {one.compressor} at {one.ratio} on {one.data}: {one.mean:.3f}{_each(one.seeds)}" for one in outside(results)
    ]
    return f"{rule}outside are\n\n" + "\n".join(failed) if failed else f"{rule}none is outside."


def _each(seeds: Sequence[float]) -> str:
    return f" (each seed: {', '.join(f'{mean:.3f}' for mean in seeds)})" if len(seeds) > 1 else ""


def count_cell(result: Result) -> str:
    return f"{result.mean:.3f} ({result.p5:.2f}–{result.p95:.2f})"


def table(results: Sequence[Result], mode: str, cell: Callable[[Result], str]) -> str:
    """One line per compressor and ratio, one column per kind of data."""
    found = {(one.compressor, one.ratio, one.data): one for one in results if one.mode == mode}
    kinds = unique(one.data for one in results)
    rows = [
        [compressor, str(ratio), *(cell(found[compressor, ratio, kind]) for kind in kinds)]
        for compressor in unique(one.compressor for one in results)
        for ratio in unique(one.ratio for one in results)
    ]
    return markdown.table(["compressor", "ratio", *kinds], rows)


def error_table(results: Sequence[Result]) -> str:
    raw = {(one.compressor, one.ratio, one.data): one.error for one in results if one.mode == RAW}

    def cell(result: Result) -> str:
        pair = (result.error, raw[result.compressor, result.ratio, result.data])
        return " / ".join("–" if error is None else f"{error:.3f}" for error in pair)

    return table(results, CLOSED, cell)


def tables(results: Sequence[Result]) -> str:
    parts = (
        ("With error feedback: achieved/asked count, mean (5 %–95 %)", table(results, CLOSED, count_cell)),
        ("Raw gradients: achieved/asked count, mean (5 %–95 %)", table(results, RAW, count_cell)),
        ("Error relative to exact top-k's: with feedback / raw", error_table(results)),
    )
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in parts)


def draw(results: Sequence[Result], picture: Path) -> None:
    """Achieved/asked count with feedback: one panel per ratio, one line per compressor, one point per kind of data."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    compressors = unique(one.compressor for one in results)
    ratios = unique(one.ratio for one in results)
    kinds = unique(one.data for one in results)
    figure = Figure(figsize=(4.2 * len(ratios), 6.2))
    axes = figure.subplots(1, len(ratios), sharey=True, sharex=True, squeeze=False)
    for panel, ratio in zip(axes[0], ratios, strict=True):
        panel.axvspan(1 - TOLERANCE, 1 + TOLERANCE, color="#dfeedd", zorder=0)
        for number, kind in enumerate(kinds):
            chosen = [one for one in results if (one.ratio, one.data, one.mode) == (ratio, kind, CLOSED)]
            # Side by side within a compressor's line, or points of equal count would hide each other.
            shift = (number - (len(kinds) - 1) / 2) * 0.09
            panel.scatter(
                [one.mean for one in chosen],
                [compressors.index(one.compressor) + shift for one in chosen],
                s=20, marker=MARKERS[KINDS.index(kind)], color=COLORS[KINDS.index(kind)], label=kind, zorder=3,
            )  # fmt: skip
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.set_title(f"ratio {ratio}", fontsize=10)
        panel.set_xlabel("achieved / asked count")
        panel.xaxis.grid(True, which="major", color="#dddddd", linewidth=0.6, zorder=0)
        for line in range(1, len(compressors)):
            panel.axhline(line - 0.5, color="#eeeeee", linewidth=0.6, zorder=0)
    axes[0][0].set_yticks(range(len(compressors)), compressors)
    axes[0][0].set_ylim(len(compressors) - 0.5, -0.5)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(kinds), frameon=False, fontsize=9)
    figure.suptitle(f"With error feedback; the band is ±{PERCENT}", fontsize=11)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(picture, dpi=110)


def page(results: Sequence[Result], conditions: Mapping[str, Any], settings: Mapping[str, Any], picture: str) -> str:
    """The page, in Markdown."""
    rooms: dict[float, list[str]] = {}
    for compressor, room in unique((one.compressor, one.room) for one in results):
        rooms.setdefault(room, []).append(compressor)
    listed = "\n".join(f"  - {room:.3g} k: {'; '.join(names)}" for room, names in sorted(rooms.items()))
    entries = unique((one.data, one.numel) for one in results if one.data in RECORDED)
    sizes = "".join(f", {kind} {numel:,}" for kind, numel in entries)
    counted = settings["steps"] - settings["burn_in"]
    return f"""# Achieved count and error of every compressor

    {conditions["command"]}

This page is written by this command; every figure is measured by it. Processor: {conditions["processor"]}, one thread;
torch {conditions["torch"]}; {conditions["processor_seconds"]:.0f} s of processor time.

- **Count**: entries sent / k, averaged over the workers; then mean, 5 % and 95 % quantile over {counted} steps, after
  {settings["burn_in"]} that are not counted (of which all but MiCRO run only {settings["raw_burn_in"]} on raw gradients).
  MiCRO's count is that of the union of its {settings["workers"]} workers, which share k. The workers of all others choose
  independently: {settings["replicas"]} of them were run.
- **Error**: `||u - C(u)|| / ||u - TopK(u)||` on the same u, for MiCRO with the whole union taken out of each worker's u; mean
  over the workers and one in {settings["error_every"]} counted steps. A dash: k entries hold all that is not zero.
- **Feedback**: what is not sent is added to the next gradient. **Raw**: every gradient by itself, but the compressor's
  adaptive state goes on.
- **digits, lstm, charlm**: gradients of three examples' models while they are trained with the workers' dense average, after
  {settings["record_burn_in"]} steps; training runs of each, together: {settings["seeds"]}. lstm has width
  {LSTM_WIDTH}, charlm width {CHARLM_WIDTH} and {CHARLM_LAYERS} layers. Parameters with fewer than {MIN_NUMEL} entries are left
  out, the others are one bucket.
- **All other data**: independent draws in every step. "{OUTLIER}" is Laplace with one entry of 10^6 in every step, at a
  position drawn anew.
- Entries of a gradient: synthetic {settings["size"]:,}{sizes}.
- DGC runs without momentum, so that it selects from the same as the others. Threshold has the threshold that selects k
  entries of the first worker's first gradient.
- "Paper" rows are the published algorithms, without safeguards of ours, and with room for what they select. GaussianK's differs
  from its authors' code in one point: it has `sqrt(mean(u^2))` for the deviation and 0 for the mean, the code has those of the
  signed u, whose mean is small beside the deviation. Of these rows only
  MiCRO's room hides something: while residuals grow, its threshold lags behind, and up to 12 k entries exceed it at ratio 0.01,
  up to 63 k at 0.001 (Laplace, the first 60 steps, with room for all). "Guarded" is SIDCo's paper rule within our safeguards.
- Threshold's room hides its count at 0.001 with feedback: with room for all it is 31 k on Laplace, 65 k on Gaussian gradients.
- On "{MOSTLY_ZERO}" there are fewer than k entries that are not zero when the ratio is larger than their part, and a
  threshold never selects zeros: counts are below k by nature there.
- What has no room in the message is not sent and not counted. A message has room for
{listed}

{verdict(results)}

![Achieved/asked count per compressor, one panel per ratio]({picture})

{tables(results)}
"""
