"""The picture of a report. Needs matplotlib; imports no framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from horovod_sparse.tools.report.log import Log

_SPAN = 20.0
"""The axis is logarithmic if the largest number is more than so many times the smallest."""


class Panel(NamedTuple):
    """One of the diagrams below each other; the steps are on its x-axis."""

    title: str
    values: Callable[[Log], list[float]]


def _per(log: Log, name: str, other: str) -> list[float]:
    pairs = zip(log.column(name), log.column(other), strict=True)
    return [value / whole if whole else math.nan for value, whole in pairs]


def _bytes(log: Log) -> list[float]:
    return [sum(both) for both in zip(log.column("bytes_sent"), log.column("dense_bytes_sent"), strict=True)]


PANELS = (
    Panel("ratio (dotted: target)", lambda log: log.column("ratio")),
    Panel("threshold", lambda log: log.column("threshold")),
    Panel("bytes sent per step", _bytes),
    Panel("norm of the residual", lambda log: log.column("residual_norm")),
    Panel("time of a step, ms", lambda log: [1e3 * value for value in log.column("seconds")]),
)


def figure(logs: Sequence[Log]) -> Figure:
    """Draw all logs, each in a colour of its own."""
    drawn = Figure(figsize=(5, 10), layout="constrained")
    for panel, ax in zip(PANELS, drawn.subplots(len(PANELS), sharex=True), strict=True):
        _draw(panel, ax, logs)
    drawn.axes[-1].set_xlabel("step")
    if len(logs) > 1:
        # A dollar would begin a formula.
        names = [log.name.replace("$", r"\$") for log in logs]
        drawn.legend(drawn.axes[0].get_lines()[: len(logs)], names, loc="outside upper left")
    return drawn


def _draw(panel: Panel, ax: Any, logs: Sequence[Log]) -> None:
    known: list[float] = []
    for number, log in enumerate(logs):
        values = panel.values(log)
        known += [value for value in values if value == value]
        # A single point is no line.
        ax.plot(log.column("step"), values, color=f"C{number}", marker="." if len(values) < 30 else "")
    if panel is PANELS[0]:
        for number, log in enumerate(logs):
            ax.plot(log.column("step"), _per(log, "target", "numel"), color=f"C{number}", linestyle=":")
    if known and 0.0 < min(known) < max(known) / _SPAN:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0.0)
    if not known:
        ax.text(0.5, 0.5, "none", transform=ax.transAxes, ha="center", va="center", color="0.4")
    ax.set_title(panel.title, fontsize=10, loc="left")
    ax.grid(color="0.9")


def save(logs: Sequence[Log], path: Path) -> None:
    """Write the picture as a PNG file."""
    figure(logs).savefig(path, dpi=120, format="png")
