"""What exchanges ask the host to learn in a step, read together. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod_sparse.exchange.protocols import Told
from horovod_sparse.ops.protocol import Array, Ops

Answer = list[list[Any]]
"""The numbers in each array that was asked for."""


class Telling:
    """Lets the host wait for a device once, for all that was asked for before the first answer is read."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._asked: list[Array] = []
        self._answers: Answer = []
        """To the first of `_asked`."""

    def ask(self, told: Told) -> Callable[[], Answer]:
        """Ask for numbers. Return a function that waits for them."""
        first = len(self._asked)
        self._asked += told.arrays

        def wait() -> Answer:
            if len(self._answers) < len(self._asked):
                self._answers += self._ops.told(self._asked[len(self._answers) :])
            return self._answers[first : first + len(told.arrays)]

        return wait
