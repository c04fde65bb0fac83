"""Functions of numbers, so that one formula works for floats and for the 0-d tensors of a framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol


class Algebra(Protocol):
    """The functions that formulas need besides operators. `float` stands for whatever the numbers are."""

    def log(self, x: float) -> float:
        """Return the natural logarithm."""

    def expm1(self, x: float) -> float:
        """Return exp(x) - 1."""

    def sqrt(self, x: float) -> float:
        """Return the square root."""

    def maximum(self, a: float, b: float) -> float:
        """Return the larger number."""

    def minimum(self, a: float, b: float) -> float:
        """Return the smaller number."""

    def choose(self, condition: bool, yes: Callable[[], float], no: Callable[[], float]) -> float:
        """Return `yes()` if the condition holds, else `no()`; the other function may be called too."""


class Floats:
    """The algebra of Python's own numbers."""

    log = staticmethod(math.log)
    expm1 = staticmethod(math.expm1)
    sqrt = staticmethod(math.sqrt)
    maximum = staticmethod(max)
    minimum = staticmethod(min)

    @staticmethod
    def choose(condition: bool, yes: Callable[[], float], no: Callable[[], float]) -> float:
        return yes() if condition else no()


FLOATS: Algebra = Floats()
