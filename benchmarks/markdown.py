"""Tables in Markdown. Imports nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def line(cells: Iterable[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table whose first columns are words. All others are numbers, and are aligned on the right."""
    aligned = "|" + "---|" * words + "---:|" * (len(header) - words)
    return "\n".join([line(header), aligned, *map(line, rows)])
