"""Local updates for NumPy, over a `SparseAllreduce`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.core.local import Outer, check_parts, digest
from horovod_sparse.numpy.allreduce import SparseAllreduce

Array = NDArray[Any]


class LocalUpdates:
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
        self.outer = Outer(every, residual_decay, outer_lr, outer_momentum)
        self.outer.check(reduce.pipeline.compressor)
        self._reduce = reduce
        self._parameters = dict(parameters)
        self._unchecked = True
        """Whether the shared parameters are still to be compared with those of the other workers."""
        if not reduce.pipeline.averages:
            raise ValueError("reduce must be made with average=True for local updates, got average=False")
        self._shared = {name: p.astype(np.promote_types(p.dtype, np.float32)) for name, p in parameters.items()}
        self._momentum = {name: np.zeros_like(shared) for name, shared in self._shared.items() if outer_momentum}
        self._steps = 0

    def step(self) -> bool:
        """Count a local step. After every `every`-th, exchange. Return whether there was an exchange."""
        self._steps += 1
        if self._steps < self.outer.every:
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Exchange now. All workers then have the same parameters. Call this on all of them.

        Raises:
            FloatingPointError: on every worker, if a parameter of any worker holds NaN or infinity. All workers then have
                the parameters of the last exchange again, and training can go on.
            ValueError: on every worker, if they differ in settings or in the parameters with which they begin.
        """
        shared = digest(self._shared.values()) if self._unchecked else "as they were"
        self._reduce.compare("local updates", self.outer, "shared parameters", shared)
        self._unchecked = False
        self._steps = 0
        # A parameter began with what its own type holds of the shared one.
        drifts = {
            name: shared.astype(self._parameters[name].dtype).astype(shared.dtype) - self._parameters[name]
            for name, shared in self._shared.items()
        }
        try:
            means = self._reduce(drifts)
        except FloatingPointError:
            self._spread()
            raise
        for name, mean in means.items():
            self.outer.update(self._shared[name], mean, self._momentum.get(name))
        self._spread()
        self._reduce.pipeline.decay(self.outer.residual_decay)

    def _spread(self) -> None:
        for name, parameter in self._parameters.items():
            parameter[...] = self._shared[name]

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker keeps beside its parameters, once there was an exchange."""
        return {
            "steps": self._steps,
            "shared": {name: shared.copy() for name, shared in self._shared.items()},
            "momentum": {name: momentum.copy() for name, momentum in self._momentum.items()},
            "compression": self._reduce.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, with the same parameters and settings.

        Raises:
            ValueError: the state belongs to other parameters, or is none of `LocalUpdates`; nothing was changed.
        """
        check_parts(state, {"shared": self._shared, "momentum": self._momentum})
        self._reduce.load_state_dict(state["compression"], self._parameters)
        for part, mine in (("shared", self._shared), ("momentum", self._momentum)):
            for name, array in mine.items():
                array[...] = state[part][name]
        self._unchecked = True
        self._steps = int(state["steps"])
