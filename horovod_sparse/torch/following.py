"""Elastic jobs: residuals follow `hvd.elastic.TorchState` when it commits, restores, and begins again with other workers."""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.elastic.state import OptimizerStateHandler
from torch import Tensor

from horovod_sparse.core.elastic import WorkersBefore
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


class Workers(WorkersBefore):
    """The workers of a PyTorch job."""

    def rank(self) -> int:
        return int(mpi_ops.rank())

    def gather(self, value: object, name: str) -> list[Any]:
        return gather_json(value, f"horovod_sparse.{name}", mpi_ops.global_process_set)

    def broadcast(self, array: Tensor, name: str) -> Tensor:
        first: Tensor = mpi_ops.broadcast(array, 0, f"horovod_sparse.{name}")
        return first

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape)

    def norm(self, array: Tensor) -> float:
        return float(array.norm())
