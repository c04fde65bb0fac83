"""What was sent while training went on: a table and a picture of the logs that `StatsLog` has written. No framework."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from horovod_sparse.core.stats_log import records

TITLES = ("log", "compressor", "steps", "mean ratio", "total bytes", "median step, ms")
PANELS = {
    "ratio": ("ratio", 1.0),
    "threshold": ("threshold", 1.0),
    "bytes sent per step": ("bytes_sent", 1.0),
    "norm of the residual": ("residual_norm", 1.0),
    "time of a step, ms": ("seconds", 1e3),
}
"""The diagrams of the picture: what each shows, and in which unit."""
_NUMBERS = ("step", "numel", "count", "dense_bytes_sent", *(name for name, _ in PANELS.values()))
_RATIO = re.compile(r"\bratio=([^,()]*(?:\([^()]*\))?)")


class Log:
    """The lines of one file. Those that a resumed run has replaced are left out.

    Raises:
        OSError, ValueError: see `stats_log.records`; what must be a number is none.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.compressors: dict[str, None] = {}
        """All that were used, by their `repr`, in order."""
        self.lines: list[dict[str, Any]] = []
        self.weights: list[int] = []
        """The number of steps that each line stands for: those since the line before."""
        before = 0
        for record in records(path):
            if "format" not in record:
                self.lines.append(record)
                self.weights.append(record["step"] - before)
            else:
                self.compressors[str(record.get("compressor"))] = None
                # A run that was resumed from a checkpoint makes the later steps again.
                while self.lines and self.lines[-1]["step"] > record["step"]:
                    self.lines.pop()
                    self.weights.pop()
            before = record["step"]
        for name in _NUMBERS:
            try:
                is_finite = all(line[name] is None or math.isfinite(line[name]) for line in self.lines)
            except (KeyError, OverflowError, TypeError):
                is_finite = False
            if not is_finite:
                raise ValueError(f"{name} must be a finite number or null in every line of {self.name!r}")

    def column(self, name: str) -> list[float]:
        """Return one number of all lines; NaN where there is none."""
        return [math.nan if line[name] is None else float(line[name]) for line in self.lines]

    def total(self, name: str) -> float:
        """Return the sum over all steps; a step that was not logged counts as the next one that was."""
        return sum(w * value for w, value in zip(self.weights, self.column(name), strict=True) if value == value)

    def row(self) -> tuple[str, ...]:
        """Return the log's row of the table, under `TITLES`."""
        ratio = self.total("count") / (self.total("numel") or math.nan)
        seconds = median([value for value in self.column("seconds") if value == value] or [math.nan])
        sent = self.total("bytes_sent") + self.total("dense_bytes_sent")
        used = ", then ".join(map(short, self.compressors))
        return self.name, used, f"{self.lines[-1]['step']:,}", f"{ratio:.5f}", f"{sent:,.0f}", f"{1e3 * seconds:,.1f}"


def short(compressor: str) -> str:
    """Return name and ratio, of the `repr` of a compressor."""
    name = compressor.removeprefix("SparseAllreduce(").partition("(")[0]
    ratio = _RATIO.search(compressor)
    return f"{name} {ratio[1]}" if ratio else name


def printable(text: str) -> str:
    """Return a text without what a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in text)


def table(logs: Sequence[Log]) -> str:
    """Return the table for a terminal."""
    cells = [TITLES, *([*map(printable, log.row())] for log in logs)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def draw(logs: Sequence[Log], path: Path) -> None:
    """Draw all logs, each in a colour of its own, as a PNG file. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 10), layout="constrained")
    for (title, (name, unit)), ax in zip(PANELS.items(), figure.subplots(len(PANELS), sharex=True), strict=True):
        for log in logs:
            values = [unit * value for value in log.column(name)]
            # A single point is no line. A dollar would begin a formula.
            marker = "." if len(values) < 30 else ""
            ax.plot(log.column("step"), values, marker=marker, label=log.name.replace("$", r"\$"))
        ax.set_title(title, fontsize=10, loc="left")
        ax.grid(color="0.9")
    figure.axes[-1].set_xlabel("step")
    if len(logs) > 1:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper left")
    figure.savefig(path, dpi=120, format="png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="a file of StatsLog, such as stats.jsonl")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw ratio, threshold, bytes and so on")


def run(arguments: argparse.Namespace) -> int:
    """Read the logs, print the table, write what was asked for, and return the exit status."""
    if arguments.picture is not None and find_spec("matplotlib") is None:
        raise SystemExit("--picture needs matplotlib, which is not installed: pip install matplotlib")
    try:
        logs = [Log(path) for path in arguments.logs]
    except (OSError, ValueError) as error:
        raise SystemExit(f"logs must be files of StatsLog: {error}") from error
    empty = [log.name for log in logs if not log.lines]
    if empty:
        raise SystemExit(
            f"{empty} have no steps yet: StatsLog writes after every 10th step, or as its argument every says"
        )
    print(table(logs))
    if arguments.picture is not None:
        draw(logs, arguments.picture)
    return 0
