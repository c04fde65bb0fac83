"""Ratios that change with the step. Plain arithmetic, no framework."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass


class Schedule(ABC):
    """The ratio as a function of the step; change it seldom, in stairs. `repr` must differ between two different schedules."""

    @property
    @abstractmethod
    def highest(self) -> float:
        """The largest ratio that is ever asked for, in (0, 1]."""

    @property
    @abstractmethod
    def final(self) -> float:
        """The ratio at the end, in (0, 1]."""

    @abstractmethod
    def ratio(self, step: int) -> float:
        """Return the ratio of a step; the first one is step 0."""

    def steps_like(self, step: int) -> range:
        """Return steps in a row that are known to have the ratio of `step`, which is one of them."""
        return range(step, step + 1)

    def stairs(self) -> Iterator[range]:
        """Return the steps of each stair of a warm-up by age, until the ratio has come down to the end; none by default."""
        return iter(())


@dataclass(frozen=True)
class ByAge(Schedule):
    """The ratio `max(end, c/(t+1))` of step t, in stairs of a factor sqrt(2), rounded up; at most 1."""

    end: float
    c: float

    @property
    def highest(self) -> float:
        return self.ratio(0)

    @property
    def final(self) -> float:
        return self.end

    def ratio(self, step: int) -> float:
        if self.c == 0.0:
            return self.end
        halvings, odd = divmod(max(math.floor(2 * math.log2((step + 1) / self.c)), 0), 2)
        return max(self.end, math.ldexp(math.sqrt(0.5) if odd else 1.0, -halvings))

    def steps_like(self, step: int) -> range:
        return next((stair for stair in self.stairs() if step in stair), range(step, sys.maxsize))

    def stairs(self) -> Iterator[range]:
        stop = 0
        while (ratio := self.ratio(stop)) > self.end:
            start = low = stop
            stop = start + 1
            while self.ratio(stop) == ratio:
                low, stop = stop, 2 * stop
            while stop - low > 1:
                middle = (low + stop) // 2
                low, stop = (middle, stop) if self.ratio(middle) == ratio else (low, middle)
            yield range(start, stop)
