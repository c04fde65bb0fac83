"""Times contestants in turn, again and again, and the unit beside each."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from selection_rows import Conditions
from selection_worker import Backend, Gradients

ELEMENTS = 2_000_000
"""Steps of small buckets are repeated until this many elements have been processed."""
Run = Callable[[], float]
"""Takes a step and returns its seconds."""


@dataclass
class Result:
    """The measurements of one contestant."""

    title: str
    conditions: Conditions
    quotients: list[float] = field(default_factory=list)
    """Time in units, one number per repetition."""
    seconds: list[float] = field(default_factory=list)

    def quantile(self, part: float) -> float:
        return float(np.quantile(self.quotients, part))

    @property
    def units(self) -> float:
        """The median of the time in units."""
        return self.quantile(0.5)

    def cells(self) -> dict[str, str]:
        """Return a line of a table, by the titles of the columns."""
        # The unit moves 12 bytes per element.
        rate = 12e-9 * self.conditions.size / float(np.median(self.seconds))
        quartiles = f"{self.quantile(0.25):.2f}-{self.quantile(0.75):.2f}"
        return {"row": self.title, "units": f"{self.units:.2f}", "quartiles": quartiles, "GB/s": f"{rate:.1f}"}


def unit(backend: Backend, gradients: Gradients, size: int) -> Run:
    """Return the least work of a selection with error feedback: `residual.add_(gradient)`."""
    residual = backend.zeros(size)

    def run() -> float:
        nonlocal residual
        gradient = gradients.next()
        begun = time.perf_counter()
        residual += gradient
        return time.perf_counter() - begun

    return run


def take_turns(contestants: Sequence[tuple[Result, Run]], unit: Run, repetitions: Iterable[int]) -> None:
    """Time contestants, and the unit before and after each, and add the times to their results."""

    def seconds(run: Run, size: int) -> float:
        steps = max(1, ELEMENTS // size)
        if steps > 1:
            # This brings what fits into the cache there, for the unit as for a contestant.
            run()
        return sum(run() for _ in range(steps)) / steps

    gc.disable()
    for _ in repetitions:
        before: float | None = None
        for result, run in contestants:
            # The processor is shared, so its speed changes. The unit is timed just before and just after the contestant.
            # It is timed once between two contestants: a second time in a row it would be faster.
            size = result.conditions.size
            before = before or seconds(unit, size)
            spent, after = seconds(run, size), seconds(unit, size)
            result.quotients.append(2.0 * spent / (before + after))
            result.seconds.append(spent)
            before = after
        gc.collect()
    gc.enable()


def text(results: Sequence[Result]) -> str:
    """Return tables for a terminal, one for each group of conditions."""
    lines: list[str] = []
    for conditions, members in groupby(results, lambda result: result.conditions):
        cells = [member.cells() for member in members]
        table = [list(cells[0]), *(list(row.values()) for row in cells)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["", str(conditions)]
        for title, *numbers in table:
            padded = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
            lines.append("  ".join([title.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)
