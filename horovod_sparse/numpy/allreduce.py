"""Sparse allreduce of NumPy arrays over an mpi4py communicator. Does not import mpi4py: the communicator is passed in."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.agreement import RELEASE, check_steps
from horovod_sparse.core.binding import check_factor
from horovod_sparse.core.layout import Layout, Parameter, Slot, plan
from horovod_sparse.core.pipeline import Pipeline, Wait
from horovod_sparse.core.state import check_state, kept_shapes
from horovod_sparse.core.statistics import NO_STATS, Stats
from horovod_sparse.exchange.cost import allreduce_bytes
from horovod_sparse.exchange.grid import groups_of
from horovod_sparse.exchange.protocols import Collective, Reduced
from horovod_sparse.numpy.compiled import host_ops

Array = NDArray[Any]

_TYPES = (np.float16, np.float32, np.float64)
"""Residuals of wider types would not hold what they are given."""


class _Started(NamedTuple):
    """A collective that was started. MPI reads and writes the memory until it has completed, so this keeps the memory alive."""

    request: Any
    message: Array
    result: Array


class SparseAllreduce:
    """Averages named arrays over all workers, sparsified, with error feedback.

    The first call fixes names, shapes and types. It compares them and the settings with those of the other workers. Arrays
    below the compressor's `min_numel`, and arrays that it excludes, are averaged dense.

        reduce = SparseAllreduce(MPI.COMM_WORLD, TopK(ratio=0.01, min_numel=0))
        mean = reduce({"weights": gradient})["weights"]

    Start workers with `mpirun -np 4 python -m mpi4py script.py`, so that a worker that raises ends the others.

    Args:
        comm: an mpi4py intracommunicator; None for a single worker.
        compression: one of this package's compressors; each `SparseAllreduce` needs its own.
        average: whether to divide the sum by the number of workers.

    Raises:
        TypeError: `compression` is not a compressor, or is a class.
    """

    def __init__(self, comm: Any, compression: Compressor, *, average: bool = True) -> None:
        if not isinstance(compression, Compressor):
            raise TypeError(f"compression must be a compressor such as TopK(ratio=0.01), got {compression!r}")
        self._comm = comm
        self._world = 1 if comm is None else int(comm.Get_size())
        self._rank = 0 if comm is None else int(comm.Get_rank())
        self._ops = host_ops()
        self._shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self._dense: set[str] = set()
        self._under_way: list[_Started] = []
        """The collectives of this step, and those of aborted steps until MPI has completed them."""
        groups = groups_of(compression.hierarchical, self._world, self._hosts)
        self.pipeline = Pipeline(
            self._ops,
            compression,
            world=self._world,
            position=self._rank,
            rank=self._rank,
            averages=average,
            groups=groups,
        )

    def __call__(self, gradients: Mapping[str, Array], *, learning_rate: float | None = None) -> dict[str, Array]:
        """Return the average of all workers' `gradients`, as new arrays by name.

        Args:
            gradients: floating-point arrays, the same names, shapes and types on every worker and in every call.
            learning_rate: the learning rate of this step, >= 0; only `lr_in_residual` needs it.

        Raises:
            TypeError: `gradients` is no mapping of names to arrays of float16, float32 or float64.
            ValueError: names, shapes or types differ from those of the first call, or from another worker's.
            FloatingPointError: on every worker, if an array of any worker holds NaN or infinity (see `not_finite`).
        """
        gradients = _arrays(gradients)
        if not self._shapes:
            self._plan(gradients)
        shapes = _shapes(gradients)
        if shapes != self._shapes:
            raise ValueError(f"gradients must be like those of the first call, {self._shapes}, got {shapes}")
        try:
            reduced = self._step(gradients, learning_rate)
        except BaseException:
            self.pipeline.abort()
            raise
        self._under_way.clear()
        return reduced

    def _step(self, gradients: Mapping[str, Array], learning_rate: float | None) -> dict[str, Array]:
        # Release the memory of the collectives of aborted steps that MPI has completed.
        self._under_way = [started for started in self._under_way if not started.request.Test()]
        if self.pipeline.buckets:
            check_steps(self.pipeline.compressor, self.pipeline.buckets[0].state.step, self._steps, self._rank)
        self.pipeline.start_step(gradients.values())
        reduced = {name: np.zeros(shape, dtype) for name, (shape, dtype) in self._shapes.items()}
        waits: dict[str, Wait] = {}
        under_way = []
        # The last array comes first, because buckets are packed so. The first call fixed the order: MPI matches by order.
        for name in reversed(self._shapes):
            if name in self._dense:
                wide = _wide(gradients[name].dtype)
                clipped = self.pipeline.preparation.clipped(gradients[name].astype(wide), str(wide))
                waits[name] = self._start(Collective("allreduce", clipped))
            else:
                bucket = self.pipeline.arrive(name, gradients[name], learning_rate)
                if bucket is not None:
                    under_way.append((bucket, self._start(self.pipeline.begin(bucket))))
        self._finish(under_way, reduced)
        for name, wait in waits.items():
            mean = wait() / self.pipeline.divisor
            self.pipeline.finish_dense(name, mean)
            reduced[name][...] = mean
        self.pipeline.end_step()
        return reduced

    def _finish(self, under_way: list[Any], reduced: dict[str, Array]) -> None:
        wide = {
            name: np.empty(array.size, _wide(array.dtype)) for name, array in reduced.items() if name not in self._dense
        }

        def write(slots: Sequence[Slot], sent: Reduced) -> None:
            sent.write([(slot.offset, wide[slot.name]) for slot in slots])
            for slot in slots:
                reduced[slot.name][...] = wide[slot.name].reshape(slot.shape)

        self.pipeline.complete(under_way, write, lambda bucket, collective: self._start(collective))

    def _start(self, collective: Collective) -> Wait:
        message = np.ascontiguousarray(collective.message)
        if self._comm is None:
            return lambda: message
        if collective.to is not None and collective.of is not None:
            width = message[0].size if message.ndim > 1 else 1
            to, of = [width * rows for rows in collective.to], [width * rows for rows in collective.of]
            result = np.empty((sum(collective.of), *message.shape[1:]), message.dtype)
            request = self._comm.Ialltoallv([message, to], [result, of])
        elif collective.kind == "alltoall":
            result = np.empty_like(message)
            request = self._comm.Ialltoall(message, result)
        elif collective.kind == "allreduce":
            result = np.empty_like(message)
            request = self._comm.Iallreduce(message, result)
        else:
            result = np.empty((self._world * message.shape[0], *message.shape[1:]), message.dtype)
            request = self._comm.Iallgather(message, result)
        self._under_way.append(_Started(request, message, result))

        def wait() -> Array:
            request.Wait()
            return result

        return wait

    def _plan(self, gradients: Mapping[str, Array], state: Mapping[str, Any] | None = None) -> None:
        """Fix names, shapes and types. Raise ValueError first if `state`, which will be loaded, does not fit them."""
        compressor = self.pipeline.compressor
        for name, gradient in gradients.items():
            if gradient.dtype not in _TYPES:
                raise TypeError(
                    f"gradients[{name!r}] must be floating point, of type float16, float32 or float64, got {gradient.dtype}; "
                    "convert it, for instance with astype(np.float64)"
                )
        try:
            if state is not None:
                self.check_state(state, gradients)
        except ValueError as error:
            # Workers whose own state fits must not go on and wait for this one.
            self._agree(gradients, str(error))
            raise
        self._agree(gradients, "")
        types = {name: compressor.residual_dtype or str(_wide(g.dtype)) for name, g in gradients.items()}
        dense = {name for name, gradient in gradients.items() if compressor.leaves_dense(name, gradient.size)}
        self._shapes, self._dense = _shapes(gradients), dense
        self.pipeline.dense_bytes_sent = sum(
            allreduce_bytes(gradients[name].size * _wide(gradients[name].dtype).itemsize, self._world) for name in dense
        )
        parameters = [
            Parameter(name, g.shape, types[name], "cpu") for name, g in gradients.items() if name not in dense
        ]
        self.pipeline.add_buckets(plan(parameters, compressor, self._world), gradients.__getitem__)
        layouts = [Layout.of([(name, g.shape)], types[name]) for name, g in gradients.items() if name in dense]
        self.pipeline.add_dense(layouts, gradients.__getitem__)

    def _agree(self, gradients: Mapping[str, Array], problem: str) -> None:
        """Compare arrays and settings with the other workers. `problem` is the error that stops this one, if any."""
        arrays = [(n, g.shape, str(g.dtype)) for n, g in gradients.items()]
        self.compare(f"release {RELEASE}", repr(self.pipeline.compressor), arrays, self.pipeline.divisor, problem)

    def everyone(self, mine: int) -> list[int]:
        """Return every worker's number. Blocks."""
        numbers: list[int] = self._start(Collective("allgather", np.array([mine])))().tolist()
        return numbers

    def compare(self, *mine: object) -> None:
        """Raise ValueError on every worker unless all of them give the same; what differs is told by its `repr`. Blocks."""
        digest = np.frombuffer(hashlib.sha256(repr(mine).encode()).digest(), np.uint8)
        everyone = self._start(Collective("allgather", digest))().reshape(self._world, -1)
        for rank, theirs in enumerate(everyone):
            if theirs.tobytes() != everyone[0].tobytes():
                raise ValueError(
                    f"rank {self._rank}: all workers must reduce the same arrays with the same settings, but worker {rank} "
                    f"and worker 0 differ; this one has {mine}"
                )

    def _hosts(self) -> list[str]:
        """Return what tells each worker's host from others."""
        digest = np.frombuffer(hashlib.sha256(socket.gethostname().encode()).digest(), np.uint8)
        everyone = self._start(Collective("allgather", digest))().reshape(self._world, -1)
        return [theirs.tobytes().hex()[:12] for theirs in everyone]

    def _steps(self, mine: int) -> list[int]:
        """Return every worker's step."""
        steps: list[int] = self._start(Collective("allgather", np.array([mine])))().tolist()
        return steps

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
        return self.pipeline.state_dict()

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shapes and types of the arrays by name, in the order of the first call; empty before it."""
        return dict(self._shapes)

    def check_state(self, state: Mapping[str, Any], gradients: Mapping[str, Array]) -> None:
        """Raise ValueError if `state` cannot be loaded for arrays like `gradients`. It concerns this worker alone."""
        shapes = _shapes(gradients)
        if self._shapes and shapes != self._shapes:
            raise ValueError(f"state must be of arrays like those of the first call, {self._shapes}, got {shapes}")
        compressor = self.pipeline.compressor
        check_state(state, compressor, *kept_shapes({name: g.shape for name, g in gradients.items()}, compressor))

    def load_state_dict(self, state: Mapping[str, Any], gradients: Mapping[str, Array] | None = None) -> None:
        """Continue from what `state_dict` returned, on every worker. This also works after a step that raised.

        Before the first call, pass arrays like the gradients: they fix names, shapes and types.

        Raises:
            TypeError: `gradients` is needed and not given, or is no mapping of names to arrays of floats.
            ValueError: the state is damaged, or belongs to other arrays or settings; nothing was changed.
        """
        if not self._shapes:
            if gradients is None:
                raise TypeError(
                    "gradients must be given before the first call, because they fix names, shapes and types, got None: "
                    "load_state_dict(state, {'weights': np.zeros_like(weights)})"
                )
            self._plan(_arrays(gradients), state)
        self.pipeline.load_state_dict(state)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals, because gradients will be `factor` times as large from now on; `factor` > 0."""
        check_factor(factor)
        self.pipeline.rescale(factor)

    def discard_step(self) -> None:
        """Discard the last call, because its result will not be applied. Do so on every worker, before the next call.

        Raises:
            RuntimeError: the compressor was not made with `discardable=True`, or there is no step to discard.
        """
        self.pipeline.discard_step()

    def reset(self) -> None:
        """Forget residuals, adaptive state and statistics."""
        self.pipeline.reset()


def _arrays(gradients: Mapping[str, Array]) -> dict[str, Array]:
    if not isinstance(gradients, Mapping):
        raise TypeError(
            f"gradients must be a mapping of names to arrays, such as {{'weights': gradient}}, got {type(gradients).__name__}"
        )
    return {name: np.asarray(gradient) for name, gradient in gradients.items()}


def _shapes(gradients: Mapping[str, Array]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    return {name: (gradient.shape, gradient.dtype) for name, gradient in gradients.items()}


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which arrays are summed: half-precision sums are rounded once, at the end, not after every worker."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)
