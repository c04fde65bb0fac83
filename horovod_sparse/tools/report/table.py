"""The table of a report: one row for each log. Imports no framework."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from horovod_sparse.tools.report.log import Log

TITLES = ("log", "compressor", "steps", "mean ratio", "total bytes", "median step, ms")
TEXTS = 2
"""How many of the columns hold text; numbers follow."""

_RATIO = re.compile(r"\bratio=([^,()]*(?:\([^()]*\))?)")


def rows(logs: Sequence[Log]) -> list[tuple[str, ...]]:
    """Return the cells of all logs, under `TITLES`."""
    return [
        (
            log.name,
            ", then ".join(map(short, log.compressors)),
            f"{log.steps:,}",
            _number(log.ratio, ".5f"),
            f"{log.bytes_sent:,.0f}",
            _number(1e3 * log.seconds, ",.1f"),
        )
        for log in logs
    ]


def short(compressor: str) -> str:
    """Return name and ratio, of the `repr` of a compressor."""
    name = compressor.removeprefix("SparseAllreduce(").partition("(")[0]
    ratio = _RATIO.search(compressor)
    return f"{name} {ratio[1]}" if ratio else name


def text(logs: Sequence[Log]) -> str:
    """Return the table for a terminal."""
    cells = [TITLES, *rows(logs)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number < TEXTS else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )


def _number(value: float, form: str) -> str:
    return "unknown" if math.isnan(value) else format(value, form)
