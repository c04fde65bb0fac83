"""Elastic jobs: residuals follow `hvd.elastic.TorchState` when it commits, restores, and begins again with other workers.

A worker keeps its residuals while others come and go. A new worker begins with zero, and with the first worker's thresholds.
The residuals of a worker that has left are lost; their norm is reported.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.elastic.state import OptimizerStateHandler

from horovod_sparse.core.state import Shapes, aligned, empty_state, replicated
from horovod_sparse.torch.exchange import gather_json


class SparseStateHandler(OptimizerStateHandler):  # type: ignore[misc]  # Horovod has no types.
    """What `TorchState` calls for an optimizer. Without one of our compressors it is Horovod's own."""

    def __init__(self, optimizer: Any) -> None:
        self._kept: dict[str, Any] | None = None
        super().__init__(optimizer)
        self.save()

    @property
    def _reducer(self) -> Any:
        return vars(self.value).get("_sparse_reducer")

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
            self._reducer.begin_again(self._reducer.state_dict())


class WorkersBefore:
    """What a worker knows of the workers of the last commit."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._norms: list[float] = []

    def commit(self, state: Mapping[str, Any]) -> None:
        """Exchange the norms of all workers' residuals. Blocks."""
        norm = math.hypot(*(float(residual.norm()) for residual in state["residuals"].values()))
        self._rank = mpi_ops.rank()
        self._norms = gather_json(norm, "horovod_sparse.commit", mpi_ops.global_process_set)

    def align(self, state: Mapping[str, Any] | None, residuals: Shapes, velocities: Shapes) -> Mapping[str, Any] | None:
        """Return a worker's state, fitted to that of the first worker, before the first step of changed workers. Blocks.

        Args:
            state: what this worker has kept; None if it is new.
            residuals: the shapes of the residuals in a state.
            velocities: the shapes of the velocities.
        """
        kept = state or empty_state()
        shared = {part: kept[part] for part in ("adaptive", "learning_rates")} if mpi_ops.rank() == 0 else None
        everyone = gather_json([self._rank, shared], "horovod_sparse.align", mpi_ops.global_process_set)
        self._report({before for before, _ in everyone})
        first = everyone[0][1]
        if not first["adaptive"]:
            return state
        made = aligned(kept, first, residuals, velocities, torch.zeros)
        for name in replicated(residuals, velocities):
            made["velocities"][name] = mpi_ops.broadcast(made["velocities"][name], 0, f"horovod_sparse.align.{name}")
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
