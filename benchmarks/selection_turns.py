"""Times contestants in turn, again and again, and the unit beside each."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from selection_rows import Conditions
from selection_worker import Backend, Gradients

ELEMENTS = 2_000_000
"""Steps of small buckets are repeated until this many elements have been processed."""
Run = Callable[[], float]
"""Takes a step and returns its seconds."""
COLUMNS = ("row", "units", "quartiles", "at most", "GB/s", "memory")


@dataclass
class Contestant:
    """Something that is timed, and its measurements."""

    title: str
    conditions: Conditions
    run: Run
    bar: float | None = None
    """The most units that it may take."""
    finish: Callable[[], None] = lambda: None
    """Is called after the last repetition."""
    memory: float | None = None
    """Peak memory of a step beyond residual, gradient and reduced gradient, as a fraction of the residual."""
    quotients: list[float] = field(default_factory=list)
    """Time in units, one number per repetition."""
    seconds: list[float] = field(default_factory=list)

    def cells(self) -> list[str]:
        """Return a line of a table, with the columns of `COLUMNS`."""
        low, units, high = np.quantile(self.quotients, (0.25, 0.5, 0.75))
        over = " (over)" if self.bar is not None and units > self.bar else ""
        bar = "" if self.bar is None else f"{self.bar:g}"
        # The unit moves 12 bytes per element.
        rate = 12e-9 * self.conditions.size / float(np.median(self.seconds))
        memory = "" if self.memory is None else f"{100 * self.memory:.1f} %"
        return [self.title, f"{units:.2f}{over}", f"{low:.2f}-{high:.2f}", bar, f"{rate:.0f}", memory]


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


def take_turns(contestants: Sequence[Contestant], unit: Run, repetitions: Iterable[int]) -> None:
    """Time contestants, and the unit before and after each."""

    def seconds(run: Run, size: int) -> float:
        steps = max(1, ELEMENTS // size)
        if steps > 1:
            # This brings what fits into the cache there, for the unit as for a contestant.
            run()
        return sum(run() for _ in range(steps)) / steps

    gc.disable()
    for _ in repetitions:
        before: float | None = None
        for one in contestants:
            # The processor is shared, so its speed changes. The unit is timed just before and just after the contestant.
            # It is timed once between two contestants: a second time in a row it would be faster.
            size = one.conditions.size
            before = before or seconds(unit, size)
            spent, after = seconds(one.run, size), seconds(unit, size)
            one.quotients.append(2.0 * spent / (before + after))
            one.seconds.append(spent)
            before = after
        gc.collect()
    gc.enable()
