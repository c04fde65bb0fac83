"""Several workers that take their steps together in this process; collectives are carried out in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from estimation_data import MOMENTUM, RECORDED
from torch import Tensor

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.layout import Parameter, Slot, layouts_of
from horovod_sparse.core.pipeline import Pipeline, Write
from horovod_sparse.exchange.protocols import Collective, Reduced
from horovod_sparse.torch.compiled import tensor_ops

OPS = tensor_ops()
Make = Callable[[float, float], Compressor]
"""(ratio, the threshold that ratio * numel entries of the first gradient exceed) -> compressor."""


def make_pipelines(compressor: Compressor, parameters: Sequence[Parameter], workers: int) -> list[Pipeline]:
    """One per worker, with the buckets of these parameters."""
    pipelines = [Pipeline(OPS, compressor, world=workers, position=p, rank=p) for p in range(workers)]
    for pipeline in pipelines:
        pipeline.add_buckets(layouts_of(parameters, compressor), lambda name: torch.zeros(1))
    return pipelines


def collective(requests: Sequence[Collective]) -> list[Tensor]:
    """What each worker gets of one collective."""
    messages, workers = [request.message for request in requests], len(requests)
    if requests[0].kind == "alltoall":
        return [torch.cat(parts) for parts in zip(*(message.chunk(workers) for message in messages), strict=True)]
    result = torch.cat(messages) if requests[0].kind == "allgather" else torch.stack(messages).sum(0)
    return [result.clone() for _ in requests]


def exchange(pipelines: Sequence[Pipeline], write: Callable[[int], Write], divisor: float = 1.0) -> None:
    """All workers' exchange of their one bucket; `write` has what each worker does with the reduced gradient."""
    following: list[Collective | None] = [pipeline.buckets[0].begin() for pipeline in pipelines]
    while following[0] is not None:
        results = collective([one for one in following if one is not None])
        following = [
            pipeline.advance(pipeline.buckets[0], result, divisor, write(worker))
            for worker, (pipeline, result) in enumerate(zip(pipelines, results, strict=True))
        ]
    for pipeline in pipelines:
        pipeline.end_step()


class Training:
    """One model of an example that is trained by some workers with one compressor.

    Each worker has its own data, its own residual and its own pipeline. They share the model.
    """

    def __init__(self, make: Make, task: str, ratio: float, workers: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.task = RECORDED[task](workers, seed)
        self.losses: list[float] = []
        """Every worker's, step by step, after that of the first gradient."""
        self.parameters = {f"p{number}": one for number, one in enumerate(self.task.model.parameters())}
        first = torch.cat([g.abs().flatten() for g in self._gradients(self.task.losses[0])])
        self.compressor = make(ratio, OPS.kth_largest(first, int(ratio * len(first))))
        described = [Parameter(name, tuple(p.shape), "float32", "cpu") for name, p in self.parameters.items()]
        sparse = [one for one in described if not self.compressor.leaves_dense(one.name, one.numel)]
        self._sparse = {one.name for one in sparse}
        self.pipelines = make_pipelines(self.compressor, sparse, workers)
        corrected = self.compressor.momentum_correction is not None
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=0.0, momentum=0.0 if corrected else MOMENTUM)
        self.steps = 0

    def _gradients(self, loss: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        value = loss()
        self.losses.append(value.item())
        return torch.autograd.grad(value, list(self.parameters.values()))

    def step(self) -> int:
        """One step of all workers; how many entries the reduced gradient has."""
        self.accumulate()
        return self.finish()

    def accumulate(self) -> None:
        """Add all workers' gradients of the next step to their residuals."""
        self.steps += 1
        dense: dict[str, list[Tensor]] = {}
        for pipeline, loss in zip(self.pipelines, self.task.losses, strict=True):
            for name, gradient in zip(self.parameters, self._gradients(loss), strict=True):
                if name in self._sparse:
                    pipeline.arrive(name, gradient)
                else:
                    dense.setdefault(name, []).append(gradient)
        for name, gradients in dense.items():
            self.parameters[name].grad = torch.stack(gradients).mean(0)

    def finish(self) -> int:
        """Exchange what has been accumulated, and update the model; how many entries the reduced gradient has."""
        entries: list[Tensor] = []

        def write(slots: Sequence[Slot], reduced: Reduced) -> None:
            entries.extend(part.indices for part in reduced.parts() if part.indices is not None)
            for slot in slots:
                gradient = torch.empty(slot.numel)
                reduced.write([(slot.offset, gradient)])
                self.parameters[slot.name].grad = gradient.view(slot.shape)

        # All workers get the same, so one of them writes.
        exchange(self.pipelines, lambda worker: _nothing if worker else write, float(len(self.pipelines)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.rate(self.steps)
        self.optimizer.step()
        # NoOp sends everything, without indices.
        return len(torch.unique(torch.cat(entries))) if entries else self.pipelines[0].buckets[0].numel


def _nothing(slots: Sequence[Slot], reduced: Reduced) -> None:
    return
