"""What was sent while training went on: a table of the logs that `StatsLog` has written. Imports no framework."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from horovod_sparse.contrib.stats_log import records

TITLES = ("log", "compressor", "steps", "mean ratio", "total bytes", "median step, ms")
_NUMBERS = ("step", "numel", "count", "bytes_sent", "dense_bytes_sent", "seconds")
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
            found = [line.get(name, math.nan) for line in self.lines]
            if not all(one is None or (type(one) in (int, float) and abs(one) < 1.79e308) for one in found):
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


def table(logs: Sequence[Log]) -> str:
    """Return the table for a terminal."""
    cells = [TITLES, *(log.row() for log in logs)]
    # A terminal would obey what cannot be printed.
    cells = [tuple("".join(one if one.isprintable() else "?" for one in cell) for cell in row) for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="a file of StatsLog, such as stats.jsonl")


def run(arguments: argparse.Namespace) -> int:
    """Read the logs, print the table, and return the exit status."""
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
    return 0
