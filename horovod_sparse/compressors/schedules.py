"""Ratios that change with the step. Plain arithmetic, no framework."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from horovod_sparse.compressors.scalars import check_fraction, plain, shown

_STAIRS = 4


class Schedule(ABC):
    """The ratio as a function of the step. `repr` must differ between two different schedules, as a dataclass's does.

    The message's shape depends on the ratio, and every new shape costs Horovod a negotiation: change it seldom, in stairs.
    """

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
        """Return the ratio of a step; the first sparse step is step 0."""


@dataclass(frozen=True)
class ByAge(Schedule):
    """The ratio `max(end, c/(t+1))` of step t, in stairs of a factor sqrt(2), rounded up; at most 1.

    With `c=0` it is `end` in all steps. With `c=1` no entry waits longer than training is old.
    """

    end: float
    c: float
    before: int = 0
    """Steps before step 0."""

    @property
    def highest(self) -> float:
        return self.ratio(0)

    @property
    def final(self) -> float:
        return self.end

    def ratio(self, step: int) -> float:
        if self.c == 0.0:
            return self.end
        halvings, odd = divmod(max(math.floor(2 * math.log2((self.before + step + 1) / self.c)), 0), 2)
        return max(self.end, math.ldexp(math.sqrt(0.5) if odd else 1.0, -halvings))


@dataclass(frozen=True)
class Warmup(Schedule):
    """See `warmup`."""

    start: float
    end: float
    steps: int
    stairs: int

    def __repr__(self) -> str:
        return shown("warmup", vars(self), {"stairs": _STAIRS})

    @property
    def highest(self) -> float:
        return self.start

    @property
    def final(self) -> float:
        return self.end

    def ratio(self, step: int) -> float:
        if step >= self.steps:
            return self.end
        stair = step * self.stairs // self.steps
        return float(self.start * (self.end / self.start) ** (stair / self.stairs))


def warmup(start: float, end: float, steps: int, *, stairs: int = _STAIRS) -> Warmup:
    """Lower the ratio from `start` to `end` in geometric stairs: `start * (end/start)^(i/stairs)` on stair i, then `end`.

    With `start=0.25, end=0.001, stairs=4` and an epoch per stair, this is the warm-up of Deep Gradient Compression
    (https://arxiv.org/abs/1712.01887): 0.25, 0.063, 0.016, 0.004, then 0.001. With a large ratio, an allgather costs more
    than a dense allreduce (see `cost.break_even_ratio`). With many workers, `dense_steps` of the compressors is therefore the
    cheaper warm-up.

    Args:
        start: ratio of the first step, in (0, 1].
        end: ratio after the warm-up, in (0, start].
        steps: how many steps the warm-up takes, >= 1.
        stairs: number of stairs, >= 1.

    Raises:
        ValueError: naming the argument and its value.
    """
    check_fraction("start", start)
    check_fraction("end", end)
    steps, stairs = plain(steps), plain(stairs)
    for name, number in (("steps", steps), ("stairs", stairs)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be an int >= 1, got {number!r}")
    if end > start:
        raise ValueError(
            f"end must be at most start={start!r}, got {end!r}: a warm-up lowers the ratio; write warmup({end!r}, {start!r}, "
            "steps=...)"
        )
    return Warmup(float(start), float(end), steps, stairs)
