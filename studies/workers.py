"""A model of an example that several workers train together in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from estimation_data import MOMENTUM, RECORDED
from numpy.typing import NDArray
from torch import Tensor

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.numpy import Balanced, Pairs, VirtualWorkers
from horovod_sparse.numpy.ops import NumpyOps

OPS = NumpyOps()
Array = NDArray[Any]
Make = Callable[[float, float], Compressor]
"""(ratio, the threshold that ratio * numel entries of the first gradient exceed) -> compressor."""


def make_workers(number: int, compressor: Compressor, shapes: Mapping[str, Sequence[int]]) -> VirtualWorkers:
    """Workers that have their buckets already, for arrays of these shapes."""
    workers = VirtualWorkers(number, compressor)
    # They make the buckets in the first call.
    workers({name: np.zeros((number, *shape), np.float32) for name, shape in shapes.items()})
    workers.reset()
    return workers


class Training:
    """One model of an example that is trained by some workers with one compressor, whose granularity is "model".

    Each worker has its own data and its own residual. They share the model.
    """

    def __init__(self, make: Make, task: str, ratio: float, workers: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.task = RECORDED[task](workers, seed)
        self.losses: list[float] = []
        """Every worker's, step by step, after that of the first gradient."""
        self.parameters = {f"p{number}": one for number, one in enumerate(self.task.model.parameters())}
        gradient = self._gradient(self.task.losses[0])
        first = np.concatenate([np.abs(one.numpy()).ravel() for one in gradient])
        self.compressor = make(ratio, OPS.kth_largest(first, int(ratio * len(first))))
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        self.workers = make_workers(workers, self.compressor, shapes)
        self.buckets = [pipeline.buckets[0] for pipeline in self.workers.pipelines]
        corrected = self.compressor.momentum_correction is not None
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=0.0, momentum=0.0 if corrected else MOMENTUM)
        self.steps = 0

    def _gradient(self, loss: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        value = loss()
        self.losses.append(value.item())
        return torch.autograd.grad(value, list(self.parameters.values()))

    def gradients(self) -> dict[str, Array]:
        """Every worker's next gradient, by parameter: gradients[name][worker]."""
        each = [self._gradient(loss) for loss in self.task.losses]
        return {
            name: torch.stack(of).numpy() for name, of in zip(self.parameters, zip(*each, strict=True), strict=True)
        }

    def accumulated(self, gradients: dict[str, Array]) -> Array:
        """The first worker's residual and gradient together."""
        x: Array = self.buckets[0].buffer.copy()
        for name, slot in self.buckets[0].slots.items():
            x[slot.offset : slot.offset + slot.numel] += gradients[name][0].ravel()
        return x

    def step(self, gradients: dict[str, Array]) -> int:
        """One step of all workers; how many entries the reduced gradient has."""
        self.steps += 1
        reduced = self.workers(gradients)
        for name, parameter in self.parameters.items():
            parameter.grad = torch.from_numpy(reduced[name])
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.rate(self.steps)
        self.optimizer.step()
        if isinstance(self.compressor.exchange, (Pairs, Balanced)):
            return sum(int(np.count_nonzero(reduced[name])) for name in self.buckets[0].slots)
        # All workers send the same entries. Random choices may be zero.
        return int(self.buckets[0].tally.last.sent)
