"""Shows what was measured, as a table to read, as Markdown, as JSON and as a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import selection_turns as turns
from machine import processor
from markdown import table
from selection_contestants import Measured

from horovod_sparse import __version__
from horovod_sparse.tools.check import instruction_sets


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "processor": processor(),
        "instruction_sets": instruction_sets(),
        "cores": os.cpu_count(),
        "horovod_sparse": __version__,
        **{name: metadata.version(name) for name in ("torch", "numpy")},
    }


def _tables(results: Sequence[Measured]) -> list[tuple[str, list[Measured]]]:
    return [(str(conditions), list(members)) for conditions, members in groupby(results, lambda r: r.conditions)]


def text(results: Sequence[Measured]) -> str:
    """Return the results as text for a terminal."""
    lines = []
    for _, members in _tables(results):
        lines.append(turns.text(members))
        for result in members:
            if result.operations:
                operations = ", ".join(f"{operation} {units:.2f}" for operation, units in result.operations.items())
                lines.append(f"    {result.title}: {operations}")
    return "\n".join(lines)


def markdown(results: Sequence[Measured]) -> str:
    """Return the results as Markdown for a page."""
    told = machine()
    versions = ", ".join(f"{name} {told[name]}" for name in ("horovod_sparse", "torch", "numpy"))
    lines = [
        f"{told['processor']} ({', '.join(told['instruction_sets'])}), {told['cores']} cores; {versions}. "
        "Unit: the time of `residual.add_(gradient)`, measured beside every row; medians and quartiles of the "
        "quotients. GB/s: 12 bytes per element by the time taken. Memory: the most"
        " that a step took beside what it began with, in parts of the residual."
    ]
    for heading, members in _tables(results):
        cells = [member.cells() for member in members]
        lines += ["", f"{heading}:", "", table([*cells[0]], [[*row.values()] for row in cells])]
    return "\n".join(lines) + "\n"


def write_json(results: Sequence[Measured], path: Path) -> None:
    """Write everything as JSON, with each repetition."""
    everything = {**machine(), "results": [result.as_json() for result in results]}
    path.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


def draw(results: Sequence[Measured], path: Path) -> None:
    """Draw bars of units with quartiles, and a mark at the bar that a row must keep. Needs matplotlib."""
    from matplotlib.figure import Figure

    tables = _tables(results)
    figure = Figure(figsize=(9, sum(1.2 + 0.3 * len(members) for _, members in tables)), layout="constrained")
    axes = figure.subplots(len(tables), squeeze=False, height_ratios=[4 + len(members) for _, members in tables])
    for (heading, members), (ax,) in zip(tables, axes, strict=True):
        units = [r.units for r in members]
        errors = [[r.units - r.quantile(0.25) for r in members], [r.quantile(0.75) - r.units for r in members]]
        ax.barh([r.title for r in members], units, xerr=errors, color="#4c78a8", ecolor="0.3")
        limits = [(r.bar, r.title) for r in members if r.bar is not None]
        if limits:
            ax.plot(*zip(*limits, strict=True), "k|", markersize=12, label="bar")
            ax.legend()
        ax.set_xscale("log")
        ax.invert_yaxis()
        ax.set_title(heading, fontsize=10)
        ax.set_xlabel("units of residual.add_(gradient)")
    figure.savefig(path, dpi=120)
