"""Many workers in this process, without threads and without MPI: for experiments. Imports no framework except NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.checks import check_integer
from horovod_sparse.core.pipeline import AnyBucket, Pipeline
from horovod_sparse.core.statistics import NO_STATS, Stats
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.numpy.allreduce import Shapes, add_buckets, arrays_of, check_compression, shapes_of, write_to
from horovod_sparse.numpy.compiled import host_ops

Array = NDArray[Any]


class VirtualWorkers:
    """Averages named arrays over workers that all live in this process, bit for bit as a `SparseAllreduce` on each would.

    What all of them receive is added up once. An allreduce adds up in the order of the workers; MPI may choose another order,
    which rounds differently.

        workers = VirtualWorkers(1024, TopK(ratio=0.01, min_numel=0))
        mean = workers({"weights": gradients})["weights"]  # gradients[worker] is one worker's

    An interrupt within a step may leave the workers in different steps: call `reset` then.

    Args:
        number: how many workers there are, >= 1.
        compression: one of this package's compressors; all workers have it.
        average: whether to divide the sum by the number of workers.
    """

    def __init__(self, number: int, compression: Compressor, *, average: bool = True) -> None:
        check_integer("number", number, least=1)
        check_compression(compression)
        self.number = number
        self._compression, self._average = compression, average
        self._shapes: Shapes = {}
        self.pipelines: list[Pipeline] = []
        """One for each worker; none before the first call."""

    def __call__(self, gradients: Mapping[str, Array], *, learning_rate: float | None = None) -> dict[str, Array]:
        """Return the average of all workers' gradients, as new arrays by name: the same on all workers, so there is one.

        Args:
            gradients: arrays of float32 or float64 and of shape `(number, ...)`, one gradient for each worker. Their names,
                shapes and types must be the same in every call.
            learning_rate: the learning rate of this step, >= 0; only `lr_in_residual` needs it.

        Raises:
            TypeError: `gradients` is no mapping of names to such arrays.
            ValueError: an array has not one gradient for each worker, or is not as in the first call.
        """
        gradients = arrays_of(gradients)
        for name, array in gradients.items():
            if array.shape[:1] != (self.number,):
                raise ValueError(
                    f"gradients[{name!r}] must have one gradient for each of {self.number} workers along its first axis, got "
                    f"shape {array.shape}; np.stack makes one array of many"
                )
        shapes = shapes_of(gradients)
        apart = [{name: array[worker, ...] for name, array in gradients.items()} for worker in range(self.number)]
        if not self.pipelines:
            self._plan(apart)
            self._shapes = shapes
        if shapes != self._shapes:
            raise ValueError(f"gradients must be like those of the first call, {self._shapes}, got {shapes}")
        reduced = {name: np.zeros(shape[1:], dtype) for name, (shape, dtype) in self._shapes.items()}
        # This also gives up a step in which an error was raised.
        for pipeline, mine in zip(self.pipelines, apart, strict=True):
            pipeline.start_step(mine.values())
        # As `SparseAllreduce` does, because buckets are packed so.
        for name in reversed(self._shapes):
            pairs = zip(self.pipelines, apart, strict=True)
            complete = [pipeline.arrive(name, mine[name], learning_rate) for pipeline, mine in pairs]
            buckets = [bucket for bucket in complete if bucket is not None]
            if buckets:
                self._exchange(buckets)
        self._end(reduced)
        return reduced

    def _plan(self, gradients: Sequence[Mapping[str, Array]]) -> None:
        pipelines, ops = [], host_ops()
        for worker, mine in enumerate(gradients):
            where: dict[str, Any] = {"world": self.number, "position": worker, "rank": worker}
            pipelines.append(Pipeline(ops, self._compression, averages=self._average, **where))
            add_buckets(pipelines[-1], mine)
        self.pipelines = pipelines

    def _exchange(self, buckets: Sequence[AnyBucket]) -> None:
        asked = [bucket.begin() for bucket in buckets]
        while asked:
            each = zip(self.pipelines, buckets, results_of(asked), strict=True)
            following = [pipeline.advance(bucket, result) for pipeline, bucket, result in each]
            asked = [one for one in following if one is not None]

    def _end(self, reduced: Mapping[str, Array]) -> None:
        """End the step of all workers. One writes what comes out and warns for all: whose own gradient is not finite."""
        first = max(self.pipelines, key=Pipeline.knows_why)
        for pipeline in [first, *(one for one in self.pipelines if one is not first)]:
            pipeline.take_warnings(first)
            pipeline.end_step(partial(write_to, reduced) if pipeline is first else lambda slots, sent: None)

    def stats(self, worker: int = 0) -> Stats:
        """Compute counts, bytes and residual norms of one worker, of the last step and on average."""
        return self.pipelines[worker].stats() if self.pipelines else NO_STATS

    def reset(self) -> None:
        """Forget the residuals, the adaptive state and the statistics of all workers."""
        for pipeline in self.pipelines:
            pipeline.reset()


def results_of(asked: Sequence[Collective]) -> list[Array]:
    """Return what each worker gets of a collective that all workers have asked for: the same array."""
    messages = [one.message for one in asked]
    kind, world = asked[0].kind, len(asked)
    if kind == "allgather":
        result = np.concatenate(messages)
    else:
        result = messages[0].copy()
        for message in messages[1:]:
            result += message
    return [result] * world
