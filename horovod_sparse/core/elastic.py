"""Elastic jobs: what a worker knows of the workers of the last commit, and how it joins those of now. Imports no framework.

A worker keeps its residuals while others come and go. A new worker begins with zero, and with the first worker's thresholds.
The residuals of a worker that has left are lost; their norm is reported.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from horovod_sparse.core.state import ARRAYS, aligned, empty_state, replicated
from horovod_sparse.ops.protocol import Array


class WorkersBefore(ABC):
    """What a worker knows of the workers of the last commit. An adapter supplies the collectives and the arrays."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._norms: list[float] = []

    @abstractmethod
    def rank(self) -> int:
        """Return the rank that this worker has now."""

    @abstractmethod
    def gather(self, value: object, name: str) -> list[Any]:
        """Return every worker's value, in rank order. Blocks."""

    @abstractmethod
    def broadcast(self, array: Array, name: str) -> Array:
        """Return the first worker's array. Blocks."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...]) -> Array:
        """Return an array of zeros."""

    @abstractmethod
    def norm(self, array: Array) -> float:
        """Return the norm of an array."""

    def commit(self, state: Mapping[str, Any]) -> None:
        """Let all workers know the norms of all workers' residuals. Blocks."""
        norm = math.hypot(*(self.norm(residual) for residual in state["residuals"].values()))
        everyone = self.gather([self._rank, norm], "commit")
        self._report({before for before, _ in everyone})
        self._rank, self._norms = self.rank(), [norm for _, norm in everyone]

    def align(self, state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return a worker's state, fitted to that of the first worker, before the first step of changed workers. Blocks.

        Args:
            state: what this worker has kept; None if it is new.
        """
        kept = state or empty_state()
        shared = None
        if self.rank() == 0:
            shared = {part: kept[part] for part in ("adaptive", "learning_rates")}
            shared |= {part: {name: list(array.shape) for name, array in kept[part].items()} for part in ARRAYS}
        everyone = self.gather([self._rank, shared], "align")
        self._report({before for before, _ in everyone})
        first = everyone[0][1]
        residuals, velocities = ({name: tuple(shape) for name, shape in first.pop(part).items()} for part in ARRAYS)
        if not first["adaptive"]:
            return state
        made = aligned(kept, first, residuals, velocities, self.zeros)
        for number, name in enumerate(replicated(residuals, velocities)):
            made["velocities"][name] = self.broadcast(made["velocities"][name], f"align.{number}")
        return made

    def _report(self, present: set[int | None]) -> None:
        lost = {rank: norm for rank, norm in enumerate(self._norms) if rank not in present}
        if lost and self.rank() == 0:
            warnings.warn(
                f"horovod_sparse: the workers of ranks {sorted(lost)} have left. Their residuals are lost, whose norm at the "
                f"last commit was {math.hypot(*lost.values()):.6g}, of {math.hypot(*self._norms):.6g} of all workers",
                stacklevel=1,
            )
        self._rank, self._norms = None, []
