"""Shows what was measured, as a table to read, as Markdown, as JSON and as a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

from horovod_sparse import __version__
from horovod_sparse.tools.bench.measure import Result
from horovod_sparse.tools.bench.rows import Conditions
from horovod_sparse.tools.machine import instruction_sets, processor

HEADER = ("row", "units", "quartiles", "GB/s", "memory", "bar")


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "processor": processor(),
        "instruction_sets": instruction_sets(),
        "cores": os.cpu_count(),
        "horovod_sparse": __version__,
        **{name: metadata.version(name) for name in ("torch", "numpy")},
    }


def cells(result: Result) -> tuple[str, ...]:
    """Return the cells of one row of the table."""
    bar = "" if result.bar is None else f"{result.bar:g}" + ("" if result.within else " exceeded")
    return (
        result.title,
        f"{result.units:.2f}",
        f"{result.quantile(0.25):.2f}-{result.quantile(0.75):.2f}",
        f"{result.gigabytes:.1f}",
        "" if result.memory is None else f"{result.memory:.1%}",
        bar,
    )


def title(conditions: Conditions) -> str:
    """Return the title of one table."""
    return (
        f"{conditions.size:,} elements, ratio {conditions.ratio:g}, {conditions.backend}, kernels: {conditions.kernels}, "
        f"threads: {conditions.threads}"
    )


def _tables(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    return [(title(conditions), list(members)) for conditions, members in groupby(results, lambda r: r.conditions)]


def text(results: Sequence[Result]) -> str:
    """Return the results as text for a terminal."""
    lines: list[str] = []
    for heading, members in _tables(results):
        table = [HEADER, *map(cells, members)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["", heading]
        for name, *numbers in table:
            padded = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
        lines += [
            f"    {result.title}: " + ", ".join(f"{verb} {units:.2f}" for verb, units in result.verbs.items())
            for result in members
            if result.verbs
        ]
    return "\n".join(lines)


def markdown(results: Sequence[Result]) -> str:
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
        lines += ["", f"{heading}:", "", _row(HEADER), "|---|" + "---:|" * (len(HEADER) - 1)]
        lines += [_row(cells(result)) for result in members]
    return "\n".join(lines) + "\n"


def _row(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"


def write_json(results: Sequence[Result], path: Path) -> None:
    """Write everything as JSON, with each repetition."""
    everything = {**machine(), "results": [{**asdict(r), "units": r.units, "memory": r.memory} for r in results]}
    path.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


def draw(results: Sequence[Result], path: Path) -> None:
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
