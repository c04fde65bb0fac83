"""Sparse allreduce of NumPy arrays over an mpi4py communicator. Does not import mpi4py: the communicator is passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse import kernels
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.agreement import RELEASE, agree_on_states, compare
from horovod_sparse.core.binding import check_factor
from horovod_sparse.core.layout import Parameter, Slot, planned
from horovod_sparse.core.pipeline import AnyBucket, Pipeline, Wait
from horovod_sparse.core.state import check_state, empty_state, kept_shapes
from horovod_sparse.core.statistics import NO_STATS, Stats
from horovod_sparse.core.store import log_start
from horovod_sparse.exchange.protocols import Collective, Reduced
from horovod_sparse.numpy.compiled import host_ops
from horovod_sparse.numpy.transport import Communicator

Array = NDArray[Any]
Shapes = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]


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
        self._transport = transport = Communicator(comm)
        self._shapes: Shapes = {}
        place: dict[str, Any] = {"world": transport.world, "position": transport.position, "rank": transport.rank}
        self._new_pipeline = partial(Pipeline, ops=host_ops(), compressor=compression, averages=average, **place)
        self.pipeline = self._new_pipeline()
        self._last: dict[str, str] = {}
        """The array of each bucket that arrives last."""
        self._under_way: dict[str, tuple[AnyBucket, Wait]] = {}
        self._exchanging = False
        """Whether this worker's part of the step is with the others, who cannot be told any more that it gives up."""

    def __call__(self, gradients: Mapping[str, Array], *, learning_rate: float | None = None) -> dict[str, Array]:
        """Return the average of all workers' `gradients`, as new arrays by name.

        Args:
            gradients: arrays of float32 or float64, the same names, shapes and types on every worker and in every call.
            learning_rate: the learning rate of this step, >= 0; only `lr_in_residual` needs it.

        Raises:
            TypeError: `gradients` is no mapping of names to such arrays.
            ValueError: names, shapes or types differ from those of the first call, or from another worker's.
            RuntimeError: another worker has raised in this call. Nothing of the step is left on any, and all may go on.
        """
        if not self._shapes:
            self._plan(arrays_of(gradients))
        self._exchanging = False
        try:
            arrays = arrays_of(gradients)
            shapes = shapes_of(arrays)
            if shapes != self._shapes:
                raise ValueError(f"gradients must be like those of the first call, {self._shapes}, got {shapes}")
            return self._step(arrays, learning_rate)
        except BaseException:
            if not (self._exchanging or self.pipeline.is_broken):
                self._give_up()
            raise

    def _step(self, gradients: Mapping[str, Array], learning_rate: float | None) -> dict[str, Array]:
        pipeline = self.pipeline
        pipeline.start_step(gradients.values())
        # The last array comes first, because buckets are packed so. The first call fixed the order: MPI matches by order.
        for name in reversed(self._shapes):
            bucket = pipeline.arrive(name, gradients[name], learning_rate)
            if bucket is not None:
                self._under_way[bucket.name] = bucket, self._start(bucket, bucket.begin())
        reduced = {name: np.zeros(shape, dtype) for name, (shape, dtype) in self._shapes.items()}
        self._end(reduced)
        return reduced

    def _start(self, _: AnyBucket, collective: Collective) -> Wait:
        return self._transport.start(collective)

    def _end(self, reduced: Mapping[str, Array]) -> None:
        """Wait for all exchanges of the step, and write what comes out to `reduced`."""
        self._exchanging = True
        under_way, self._under_way = [*self._under_way.values()], {}
        self.pipeline.complete(under_way, self._start)
        self.pipeline.end_step(partial(write_to, reduced), self._transport.everyone)

    def _give_up(self) -> None:
        """Tell the other workers, which wait for this one's part of the step, that it gives the step up."""
        for name in reversed(self._shapes):
            bucket = self.pipeline.bucket_of[name]
            # A bucket is complete with its first array, which is the last to arrive.
            if name == self._last[bucket.name] and bucket.name not in self._under_way:
                self.pipeline.spoil(bucket)
                self._under_way[bucket.name] = bucket, self._start(bucket, bucket.begin())
        self._end({})

    def _plan(self, gradients: Mapping[str, Array], state: Mapping[str, Any] | None = None) -> None:
        """Fix names, shapes and types. Raise ValueError first, on every worker, if a `state` to be loaded does not fit."""
        transport, compressor = self._transport, self.pipeline.compressor
        mine: dict[str, str | list[str]] = {
            "release": RELEASE,
            "compression": repr(compressor),
            "arrays": [f"{name} {one.shape} {one.dtype}" for name, one in gradients.items()],
            "divisor": str(self.pipeline.divisor),
        }
        compare(mine, transport.everyone(mine), transport.rank)
        shapes = {name: one.shape for name, one in gradients.items()}

        def check() -> None:
            if state is not None:
                check_state(state, compressor, *kept_shapes(shapes, compressor))

        agree_on_states(check, empty_state() if state is None else state, transport)
        pipeline = self._new_pipeline()
        add_buckets(pipeline, gradients)
        self.pipeline, self._shapes = pipeline, shapes_of(gradients)
        self._last = {pipeline.bucket_of[name].name: name for name in reversed(self._shapes)}

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
    """Raise TypeError unless `compression` is a compressor that NumPy arrays can have."""
    if not isinstance(compression, Compressor):
        raise TypeError(f"compression must be a compressor such as TopK(ratio=0.01), got {compression!r}")


def arrays_of(gradients: Mapping[str, Array]) -> dict[str, Array]:
    """Return `gradients` as arrays. Raise TypeError unless they have names and are of types that residuals have."""
    if not isinstance(gradients, Mapping):
        raise TypeError(
            f"gradients must be a mapping of names to arrays, such as {{'weights': gradient}}, got {type(gradients).__name__}"
        )
    arrays = {name: np.asarray(gradient) for name, gradient in gradients.items()}
    for name, array in arrays.items():
        if array.dtype not in (np.float32, np.float64):
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
