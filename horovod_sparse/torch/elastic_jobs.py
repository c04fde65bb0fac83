"""Elastic jobs: residuals follow `hvd.elastic.TorchState` when it commits, restores, and begins again with other workers.

Tested by tests/parallel/test_elastic.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.elastic.state import OptimizerStateHandler

from horovod_sparse.core.state import ARRAYS, empty_state, holds_anything
from horovod_sparse.torch.exchange import gather_json


class SparseStateHandler(OptimizerStateHandler):  # type: ignore[misc]  # Horovod has no types.
    """What `TorchState` calls for an optimizer. Without one of our compressors it is Horovod's own."""

    def __init__(self, optimizer: Any) -> None:
        self._kept: dict[str, Any] | None = None
        super().__init__(optimizer)
        self.save()

    @property
    def _source(self) -> Any:
        return getattr(self.value, "_sparse_source", None)

    def save(self) -> None:
        super().save()
        if self._source is not None:
            self._kept = self._source.driver.state_dict()

    def restore(self) -> None:
        if self._source is not None:
            # Horovod may be down: nothing may wait for it.
            self._source.begin_again(self._kept)
        super().restore()

    def reset(self) -> None:
        """Begin again, because the workers have changed. What is kept stays."""
        if self._source is not None:
            self._source.drop_step()
            self._source.begin_again(self._source.driver.state_dict())


def align(state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a worker's state, fitted to that of the first worker, before the first step of changed workers. Blocks.

    A worker keeps its residuals while others come and go. A new worker (None) begins with zero, and with the first worker's
    thresholds. The residuals of a worker that has left are lost.
    """
    kept = state or empty_state()
    shared = None
    if mpi_ops.rank() == 0:
        shared = {part: kept[part] for part in ("adaptive", "lr_in_residual")}
        shared |= {part: {name: list(array.shape) for name, array in kept[part].items()} for part in ARRAYS}
    first = gather_json(shared, "horovod_sparse.align", mpi_ops.global_process_set)[0]
    shapes = {part: first.pop(part) for part in ARRAYS}
    if not first["adaptive"]:
        return state
    made = {**kept, **first}
    mine, theirs = ({name: one["step"] for name, one in some["adaptive"].items()} for some in (kept, first))
    if not holds_anything(kept):
        made |= {part: {name: torch.zeros(shape) for name, shape in some.items()} for part, some in shapes.items()}
    elif mine == theirs:
        # Else this worker has committed a step that the first one has not, or the other way round.
        made = dict(kept)
    return made
