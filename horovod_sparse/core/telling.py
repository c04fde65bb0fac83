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
        self._asked: list[list[Array]] = []
        self._answers: list[Answer] = []

    def ask(self, told: Told) -> Callable[[], Answer]:
        """Ask for numbers. Return a function that waits for them."""
        number = len(self._asked)
        self._asked.append(told.arrays)
        return lambda: self._answer(number)

    def _answer(self, number: int) -> Answer:
        if number >= len(self._answers):
            unread = self._asked[len(self._answers) :]
            numbers = iter(self._ops.told([array for arrays in unread for array in arrays]))
            self._answers += [[next(numbers) for _ in arrays] for arrays in unread]
        return self._answers[number]
