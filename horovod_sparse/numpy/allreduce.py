"""Sparse allreduce of NumPy arrays over an mpi4py communicator. Does not import mpi4py: the communicator is passed in."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse import kernels
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.agreement import RELEASE, check_steps, refuse_detached, refuse_updates
from horovod_sparse.core.binding import check_factor
from horovod_sparse.core.layout import Parameter, Slot, planned
from horovod_sparse.core.pipeline import Pipeline, Wait
from horovod_sparse.core.state import check_state, kept_shapes
from horovod_sparse.core.statistics import NO_STATS, Stats
from horovod_sparse.core.store import log_start
from horovod_sparse.exchange.protocols import Collective, Reduced
from horovod_sparse.numpy.compiled import host_ops

Array = NDArray[Any]
Shapes = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]

_TYPES = [np.dtype(one) for one in ("float32", "float64")]
"""Those that residuals have."""

_GIVEN_UP, _EXCHANGED, _RETURNED = range(3)
"""How a worker's step has ended: within its collectives, after them, or by returning what was reduced."""


@dataclass(eq=False)
class _Started:
    """A collective that was started. MPI reads and writes the memory until it has completed, so this keeps the memory alive."""

    message: Array
    result: Array
    request: Any = None
    """None if an interrupt came while it was started."""

    def wait(self) -> Array:
        self.request.Wait()
        return self.result

    def wait_unless_told(self, comm: Any) -> Array:
        """Do as `wait`, but raise RuntimeError if another worker has given up the step: it may never take part."""
        while not self.request.Test():
            if comm.Iprobe():
                raise RuntimeError(
                    f"rank {comm.Get_rank()}: another worker has raised within this step, and given it up; see its error"
                )
            # As MPI does where there are more workers than processors.
            time.sleep(0)
        return self.result


class SparseAllreduce:
    """Averages named arrays over all workers, sparsified, with error feedback.

    The first call fixes names, shapes and types. It compares them and the settings with those of the other workers.

        reduce = SparseAllreduce(MPI.COMM_WORLD, TopK(ratio=0.01, min_numel=0))
        mean = reduce({"weights": gradient})["weights"]

    Args:
        comm: an mpi4py intracommunicator; None for a single worker.
        compression: one of this package's compressors; each `SparseAllreduce` needs its own.
        average: whether to divide the sum by the number of workers.

    Raises:
        TypeError: `compression` is not a compressor, or is a class.
    """

    def __init__(self, comm: Any, compression: Compressor, *, average: bool = True) -> None:
        check_compression(compression)
        self._comm = comm
        self._world = 1 if comm is None else int(comm.Get_size())
        self._rank = 0 if comm is None else int(comm.Get_rank())
        self._shapes: Shapes = {}
        self._under_way: list[_Started] = []
        """The collectives of this step, and those of aborted steps until MPI has completed them."""
        self._lane = comm
        """The communicator of steps. MPI matches by order, so after a step that was given up there must be another."""
        self._meeting: Wait | None = None
        """Waits for what the workers tell each other before a step."""
        self._ended = _RETURNED
        """How this worker's last step has ended."""
        place: dict[str, Any] = {"world": self._world, "position": self._rank, "rank": self._rank}
        self._new_pipeline = partial(Pipeline, ops=host_ops(), compressor=compression, averages=average, **place)
        self.pipeline = self._new_pipeline()

    def __call__(self, gradients: Mapping[str, Array], *, learning_rate: float | None = None) -> dict[str, Array]:
        """Return the average of all workers' `gradients`, as new arrays by name.

        Args:
            gradients: arrays of float32 or float64, the same names, shapes and types on every worker and in every call.
            learning_rate: the learning rate of this step, >= 0; only `lr_in_residual` needs it.

        Raises:
            TypeError: `gradients` is no mapping of names to such arrays.
            ValueError: names, shapes or types differ from those of the first call, or from another worker's.
            FloatingPointError: on every worker, if an array of any worker holds NaN or infinity (see `not_finite`).
            RuntimeError: on every worker, if the last call has returned on some workers and raised on others.
        """
        gradients = arrays_of(gradients)
        if not self._shapes:
            self._plan(gradients)
        shapes = shapes_of(gradients)
        if shapes != self._shapes:
            raise ValueError(f"gradients must be like those of the first call, {self._shapes}, got {shapes}")
        try:
            reduced = self._step(gradients, learning_rate)
        except BaseException:
            self.pipeline.abort()
            self._tell_others()
            raise
        self._under_way.clear()
        self._ended = _RETURNED
        return reduced

    def _step(self, gradients: Mapping[str, Array], learning_rate: float | None) -> dict[str, Array]:
        # Release the memory of the collectives of aborted steps that MPI has completed.
        self._under_way = [one for one in self._under_way if one.request is None or not one.request.Test()]
        self._meet()
        self.pipeline.start_step(gradients.values())
        reduced = {name: np.zeros(shape, dtype) for name, (shape, dtype) in self._shapes.items()}
        under_way = []
        # The last array comes first, because buckets are packed so. The first call fixed the order: MPI matches by order.
        for name in reversed(self._shapes):
            bucket = self.pipeline.arrive(name, gradients[name], learning_rate)
            if bucket is not None:
                under_way.append((bucket, self._start(bucket.begin(), self._lane)))
        write = partial(write_to, reduced)
        self.pipeline.complete(under_way, write, lambda _, collective: self._start(collective, self._lane))
        self._ended = _EXCHANGED
        self.pipeline.end_step()
        return reduced

    def _meet(self) -> None:
        """Find out where the other workers are before a step begins. Blocks."""
        step = self.pipeline.buckets[0].state.step if self.pipeline.buckets else 0
        if self._meeting is None:
            # After an interrupt the others know these numbers already.
            self._meeting = self._start(Collective("allgather", np.array([self._ended, step])))
        ended, steps = self._meeting().reshape(self._world, -1).T.tolist()
        # In one statement: either the others are still to be met, or this worker takes part in their step.
        self._meeting, self._ended = None, _GIVEN_UP
        raised = [rank for rank, how in enumerate(ended) if how != _RETURNED]
        # This is told once: afterwards the step has been given up on all workers.
        if 0 < len(raised) < self._world:
            raise RuntimeError(
                f"rank {self._rank}: the last call must have returned on all workers, but has raised on {raised} alone, and "
                "parameters may differ. Load a checkpoint on all workers"
            )
        if self.pipeline.compressor.changes:
            check_steps(steps, self._rank)
        if _GIVEN_UP in ended:
            self._lane = self._comm and self._comm.Dup()

    def _start(self, collective: Collective, comm: Any = None) -> Wait:
        message = np.ascontiguousarray(collective.message)
        comm = self._comm if comm is None else comm
        if comm is None:
            return lambda: message
        rows = len(message) * (self._world if collective.kind == "allgather" else 1)
        rows = rows if collective.of is None else sum(collective.of)
        started = _Started(message, np.empty((rows, *message.shape[1:]), message.dtype))
        # First, because MPI may write to this memory as soon as the collective has begun.
        self._under_way.append(started)
        if collective.to is not None and collective.of is not None:
            width = message[0].size if message.ndim > 1 else 1
            to, of = [width * rows for rows in collective.to], [width * rows for rows in collective.of]
            started.request = comm.Ialltoallv([message, to], [started.result, of])
        else:
            begin = {"allgather": comm.Iallgather, "allreduce": comm.Iallreduce, "alltoall": comm.Ialltoall}
            started.request = begin[collective.kind](message, started.result)
        return started.wait if comm is self._comm else partial(started.wait_unless_told, comm)

    def _tell_others(self) -> None:
        """Tell the other workers that this one has given up a step whose collectives they may wait for. Does not wait."""
        for other in range(self._world):
            if other != self._rank and self._ended == _GIVEN_UP:
                told = _Started(np.zeros(1, np.uint8), np.zeros(0))
                self._under_way.append(told)
                told.request = self._lane.Isend(told.message, other)

    def _plan(self, gradients: Mapping[str, Array], state: Mapping[str, Any] | None = None) -> None:
        """Fix names, shapes and types. Raise ValueError first if `state`, which will be loaded, does not fit them."""
        compressor = self.pipeline.compressor
        try:
            if state is not None:
                shapes = {name: gradient.shape for name, gradient in gradients.items()}
                check_state(state, compressor, *kept_shapes(shapes, compressor))
        except ValueError as error:
            # Workers whose own state fits must not go on and wait for this one.
            self._agree(gradients, str(error))
            raise
        self._agree(gradients, "")
        # Only workers with the same settings gather their hosts.
        pipeline = self._new_pipeline(groups=compressor.exchange.hosts(self._world, self._digests))
        add_buckets(pipeline, gradients)
        lane = self._comm and self._comm.Dup()
        self.pipeline, self._lane, self._shapes = pipeline, lane, shapes_of(gradients)

    def _agree(self, gradients: Mapping[str, Array], problem: str) -> None:
        """Raise ValueError on every worker unless all have the same arrays and settings. `problem` is this one's error."""
        arrays = [(n, g.shape, str(g.dtype)) for n, g in gradients.items()]
        mine = f"release {RELEASE}", repr(self.pipeline.compressor), arrays, self.pipeline.divisor, problem
        everyone = self._digests(repr(mine))
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise ValueError(
                    f"rank {self._rank}: all workers must reduce the same arrays with the same settings, but worker {rank} "
                    f"and worker 0 differ; this one has {mine}"
                )

    def _digests(self, text: str) -> list[str]:
        """Return what tells each worker's text from others."""
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
        everyone = self._start(Collective("allgather", digest))().reshape(self._world, -1)
        return [theirs.tobytes().hex()[:16] for theirs in everyone]

    def __repr__(self) -> str:
        return f"SparseAllreduce({self.pipeline.compressor!r})"

    @property
    def steps(self) -> int:
        """Number of steps that `stats` counts, without the cost of computing the rest."""
        return self.pipeline.steps

    def stats(self) -> Stats:
        """Compute counts, bytes and residual norms per bucket and in total, of the last step and on average."""
        return self.pipeline.stats() if self._shapes else NO_STATS

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's residuals and adaptive state by array name, once there was a first call."""
        # An interrupt may have come while a step was given up.
        self.pipeline.abort()
        return self.pipeline.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], gradients: Mapping[str, Array] | None = None) -> None:
        """Continue from what `state_dict` returned, on every worker. This also works after a step that raised.

        Before the first call, pass arrays like the gradients: they fix names, shapes and types.

        Raises:
            TypeError: `gradients` is needed and not given, or is no mapping of names to such arrays.
            ValueError: the state is damaged, or belongs to other arrays or settings; nothing was changed.
        """
        if not self._shapes:
            if gradients is None:
                raise TypeError(
                    "gradients must be given before the first call, because they fix names, shapes and types, got None: "
                    "load_state_dict(state, {'weights': np.zeros_like(weights)})"
                )
            self._plan(arrays_of(gradients), state)
        self.pipeline.load_state_dict(state)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals, because gradients will be `factor` times as large from now on; `factor` > 0."""
        check_factor(factor)
        self.pipeline.rescale(factor)

    def reset(self) -> None:
        """Forget residuals, adaptive state and statistics."""
        self.pipeline.reset()


def check_compression(compression: object) -> None:
    """Raise TypeError or ValueError unless `compression` is a compressor that NumPy arrays can have."""
    if not isinstance(compression, Compressor):
        raise TypeError(f"compression must be a compressor such as TopK(ratio=0.01), got {compression!r}")
    refuse_updates(compression, "NumPy")
    refuse_detached(compression, "NumPy")


def arrays_of(gradients: Mapping[str, Array]) -> dict[str, Array]:
    """Return `gradients` as arrays. Raise TypeError unless they have names and are of types that residuals have."""
    if not isinstance(gradients, Mapping):
        raise TypeError(
            f"gradients must be a mapping of names to arrays, such as {{'weights': gradient}}, got {type(gradients).__name__}"
        )
    arrays = {name: np.asarray(gradient) for name, gradient in gradients.items()}
    for name, array in arrays.items():
        if array.dtype not in _TYPES:
            raise TypeError(
                f"gradients[{name!r}] must be floating point, of type float32 or float64, got {array.dtype}; convert it, "
                "for instance with astype(np.float64)"
            )
    return arrays


def shapes_of(gradients: Mapping[str, Array]) -> Shapes:
    """Return the shapes and types of arrays."""
    return {name: (gradient.shape, gradient.dtype) for name, gradient in gradients.items()}


def add_buckets(pipeline: Pipeline, gradients: Mapping[str, Array]) -> None:
    """Add the buckets of arrays like `gradients` to a new pipeline."""
    compressor = pipeline.compressor
    parameters = [
        Parameter(name, gradient.shape, compressor.residual_dtype_of(gradient), "cpu")
        for name, gradient in gradients.items()
    ]
    buckets, dense = planned(parameters, compressor, pipeline.world)
    pipeline.add_buckets(buckets, gradients.__getitem__)
    pipeline.add_dense(dense, gradients.__getitem__)
    log_start(pipeline, kernels.variant())


def write_to(reduced: Mapping[str, Array], slots: Sequence[Slot], sent: Reduced) -> None:
    """Write reduced gradients to the arrays `reduced`, which are contiguous."""
    sent.write([(slot.offset, reduced[slot.name].reshape(-1)) for slot in slots])
