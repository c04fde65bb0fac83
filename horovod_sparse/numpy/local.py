"""Local updates for NumPy, over a `SparseAllreduce`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.core.local import Local, Outer, next_number
from horovod_sparse.numpy.allreduce import SparseAllreduce

Array = NDArray[Any]


class LocalUpdates(Local):
    """Local steps on each worker alone, and now and then a sparse exchange of how far the parameters have moved.

        local = LocalUpdates(SparseAllreduce(MPI.COMM_WORLD, TopK(0.01)), {"weights": weights}, every=30)
        for batch in batches:
            weights -= lr * gradient(weights, batch)
            local.step()

    The formulas are in `horovod_sparse.core.local`, after SparseLoCo (https://arxiv.org/abs/2508.15706).

    Args:
        reduce: averages over the workers; it serves nothing else.
        parameters: the arrays that the local steps change, in place. All workers begin with the same.
        every: number of local steps between two exchanges, >= 1.
        residual_decay: what is left of the residual after each exchange, in (0, 1].
        outer_lr: learning rate of the exchanged movement, > 0.
        outer_momentum: Nesterov momentum of the exchanged movement, in [0, 1).

    Raises:
        ValueError: a number is not in its range.
    """

    def __init__(
        self,
        reduce: SparseAllreduce,
        parameters: Mapping[str, Array],
        *,
        every: int = 30,
        residual_decay: float = 0.95,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
    ) -> None:
        outer = Outer(every, residual_decay, outer_lr, outer_momentum)
        outer.check(reduce.pipeline.compressor)
        if not reduce.pipeline.averages:
            raise ValueError("reduce must be made with average=True for local updates, got average=False")
        # An exchange that fails must leave no trace, because the drift is still there.
        reduce.pipeline.compressor.discardable = True
        shared = {name: p.astype(np.promote_types(p.dtype, np.float32)) for name, p in parameters.items()}
        super().__init__(outer, parameters, shared, reduce)

    def step(self) -> bool:
        """Count a local step. After every `every`-th, exchange. Return whether there was an exchange."""
        exchanges = self._count()
        if exchanges:
            self.synchronize()
        return exchanges

    def _exchange(self) -> dict[str, Array]:
        self._reducer.compare(self._described())
        self._agree(self._reducer.everyone(next_number()))
        # A parameter began with what its own type holds of the shared one.
        drifts = {
            name: shared.astype(self._parameters[name].dtype).astype(shared.dtype) - self._parameters[name]
            for name, shared in self._shared.items()
        }
        means: dict[str, Array] = self._reducer(drifts)
        return means

    def _load(self, state: Mapping[str, Any]) -> None:
        self._reducer.load_state_dict(state, self._parameters)
