"""Functions of numbers, so that a formula that is written once serves floats and the 0-d tensors of a framework alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol


class Algebra(Protocol):
    """What formulas need beside operators. `float` stands for whatever the numbers are."""

    def log(self, x: float) -> float:
        """Natural logarithm."""

    def expm1(self, x: float) -> float:
        """exp(x) - 1."""

    def sqrt(self, x: float) -> float:
        """Square root."""

    def maximum(self, a: float, b: float) -> float:
        """The larger one."""

    def minimum(self, a: float, b: float) -> float:
        """The smaller one."""

    def choose(self, condition: bool, yes: Callable[[], float], no: Callable[[], float]) -> float:
        """`yes()` if the condition holds, else `no()`; the other one may be called too."""


class Floats:
    """Python's own numbers."""

    log = staticmethod(math.log)
    expm1 = staticmethod(math.expm1)
    sqrt = staticmethod(math.sqrt)
    maximum = staticmethod(max)
    minimum = staticmethod(min)

    @staticmethod
    def choose(condition: bool, yes: Callable[[], float], no: Callable[[], float]) -> float:
        return yes() if condition else no()


FLOATS: Algebra = Floats()
