"""Elastic jobs: residuals follow `hvd.elastic.TorchState` when it commits, restores, and begins again with other workers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.elastic.state import OptimizerStateHandler

from horovod_sparse.core.state import ARRAYS, aligned, empty_state, replicated
from horovod_sparse.torch.exchange import gather_json


class SparseStateHandler(OptimizerStateHandler):  # type: ignore[misc]  # Horovod has no types.
    """What `TorchState` calls for an optimizer. Without one of our compressors it is Horovod's own."""

    def __init__(self, optimizer: Any) -> None:
        self._kept: dict[str, Any] | None = None
        super().__init__(optimizer)
        self.save()

    @property
    def _reducer(self) -> Any:
        return getattr(self.value, "_sparse_reducer", None)

    def save(self) -> None:
        super().save()
        if self._reducer is not None:
            self._kept = self._reducer.state_dict()

    def restore(self) -> None:
        if self._reducer is not None:
            # Horovod may be down: nothing may wait for it.
            self._reducer.begin_again(self._kept)
        super().restore()

    def commit(self) -> None:
        """Let all workers know the norms of what has just been saved. Blocks."""
        if self._reducer is not None:
            self._reducer.workers_before.commit(self._kept)

    def reset(self) -> None:
        """Begin again, because the workers have changed. What is kept stays."""
        if self._reducer is not None:
            self._reducer.give_up()
            self._reducer.begin_again(self._reducer.state_dict())


class WorkersBefore:
    """What a worker knows of the workers of the last commit, and how it joins those of now.

    A worker keeps its residuals while others come and go. A new worker begins with zero, and with the first worker's
    thresholds. The residuals of a worker that has left are lost; their norm is reported.
    """

    def __init__(self) -> None:
        self._rank: int | None = None
        self._norms: list[float] = []

    def commit(self, state: Mapping[str, Any]) -> None:
        """Let all workers know the norms of all workers' residuals. Blocks."""
        norm = math.hypot(*(float(residual.norm()) for residual in state["residuals"].values()))
        everyone = _gather([self._rank, norm], "commit")
        self._report({before for before, _ in everyone})
        self._rank, self._norms = int(mpi_ops.rank()), [norm for _, norm in everyone]

    def align(self, state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return a worker's state, fitted to that of the first worker, before the first step of changed workers. Blocks.

        Args:
            state: what this worker has kept; None if it is new.
        """
        kept = state or empty_state()
        shared = None
        if mpi_ops.rank() == 0:
            shared = {part: kept[part] for part in ("adaptive", "learning_rates")}
            shared |= {part: {name: list(array.shape) for name, array in kept[part].items()} for part in ARRAYS}
        everyone = _gather([self._rank, shared], "align")
        self._report({before for before, _ in everyone})
        first = everyone[0][1]
        residuals, velocities = ({name: tuple(shape) for name, shape in first.pop(part).items()} for part in ARRAYS)
        if not first["adaptive"]:
            return state
        made = aligned(kept, first, residuals, velocities, torch.zeros)
        for number, name in enumerate(replicated(residuals, velocities)):
            made["velocities"][name] = mpi_ops.broadcast(made["velocities"][name], 0, f"horovod_sparse.align.{number}")
        return made

    def _report(self, present: set[int | None]) -> None:
        lost = {rank: norm for rank, norm in enumerate(self._norms) if rank not in present}
        if lost and mpi_ops.rank() == 0:
            warnings.warn(
                f"horovod_sparse: the workers of ranks {sorted(lost)} have left. Their residuals are lost, whose norm at the "
                f"last commit was {math.hypot(*lost.values()):.6g}, of {math.hypot(*self._norms):.6g} of all workers",
                stacklevel=1,
            )
        self._rank, self._norms = None, []


def _gather(value: object, name: str) -> list[Any]:
    return gather_json(value, f"horovod_sparse.{name}", mpi_ops.global_process_set)
