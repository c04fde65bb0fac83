"""Many workers in this process, without threads and without MPI: for experiments. Imports no framework except NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse import kernels
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.checks import check_integer
from horovod_sparse.core.binding import check_kind
from horovod_sparse.core.driver import log_start
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.core.plan import planned
from horovod_sparse.core.sending import Sending
from horovod_sparse.core.statistics import NO_STATS, Stats
from horovod_sparse.core.step import Step
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.numpy.allreduce import Shapes, arrays_of, parameters_of, shapes_of, write_to
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
        check_kind(compression, Compressor, "horovod_sparse.numpy", stock=False)
        self.number = number
        self._compression, self._average = compression, average
        self._shapes: Shapes = {}
        self.feedbacks: list[Feedback] = []
        """One for each worker; none before the first call."""
        self._steps: list[Step] = []
        """The step of each worker; none between two calls."""

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
        if not self.feedbacks:
            self._plan(apart)
            self._shapes = shapes
        if shapes != self._shapes:
            raise ValueError(f"gradients must be like those of the first call, {self._shapes}, got {shapes}")
        reduced = {name: np.zeros(shape[1:], dtype) for name, (shape, dtype) in self._shapes.items()}
        self._drop()
        steps = self._steps = [Step(one) for one in self.feedbacks]
        # As `SparseAllreduce` does, because buckets are packed so.
        for name in reversed(self._shapes):
            complete = [step.add(name, mine[name], learning_rate) for step, mine in zip(steps, apart, strict=True)]
            sendings = [sending for sending in complete if sending is not None]
            if sendings:
                self._exchange(sendings)
        self._end(reduced)
        return reduced

    def _plan(self, gradients: Sequence[Mapping[str, Array]]) -> None:
        feedbacks, ops, compression = [], host_ops(), self._compression
        for worker, mine in enumerate(gradients):
            where: dict[str, Any] = {"world": self.number, "position": worker, "rank": worker}
            feedbacks.append(Feedback(ops, compression, averages=self._average, **where))
            layouts = planned(parameters_of(mine, compression), compression, self.number)
            feedbacks[-1].add_buckets(layouts, mine.__getitem__)
        log_start(feedbacks[0], kernels.variant())
        self.feedbacks = feedbacks

    def _exchange(self, sendings: Sequence[Sending]) -> None:
        asked = [sending.begin() for sending in sendings]
        while asked:
            each = zip(self._steps, sendings, results_of(asked), strict=True)
            following = [step.advance([(sending, result)]) for step, sending, result in each]
            asked = [collective for one in following for _, collective in one]

    def _end(self, reduced: Mapping[str, Array]) -> None:
        """End the step of all workers. One writes what comes out and warns for all: whose own gradient is not finite."""
        steps, self._steps = self._steps, []
        first = max(steps, key=lambda step: bool(step.bad()))
        for step in [first, *(one for one in steps if one is not first)]:
            one, other = step.feedback, first.feedback
            one.warned, one.warned_not_finite = other.warned, other.warned_not_finite
            step.finish(partial(write_to, reduced) if step is first else lambda slots, sent: None)

    def _drop(self) -> None:
        """Forget a step in which an error was raised."""
        steps, self._steps = self._steps, []
        for step in steps:
            step.abandon()

    def stats(self, worker: int = 0) -> Stats:
        """Compute counts, bytes and residual norms of one worker, of the last step and on average."""
        return self.feedbacks[worker].stats() if self.feedbacks else NO_STATS

    def reset(self) -> None:
        """Forget the residuals, the adaptive state and the statistics of all workers."""
        self._drop()
        for one in self.feedbacks:
            one.reset()


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
