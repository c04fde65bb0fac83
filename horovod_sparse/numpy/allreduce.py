"""Sparse allreduce of NumPy arrays over an mpi4py communicator. Does not import mpi4py: the communicator is passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse import kernels
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.agreement import compare, description
from horovod_sparse.core.binding import check_factor, check_kind
from horovod_sparse.core.driver import Driver
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.core.layout import Parameter, Slot
from horovod_sparse.core.state import check_parts
from horovod_sparse.core.statistics import Stats
from horovod_sparse.exchange.protocols import Reduced
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
        check_kind(compression, Compressor, "horovod_sparse.numpy", stock=False)
        self._transport = transport = Communicator(comm)
        self._shapes: Shapes = {}
        place: dict[str, Any] = {"world": transport.world, "position": transport.position, "rank": transport.rank}
        new_feedback = partial(Feedback, ops=host_ops(), compressor=compression, averages=average, **place)
        self.driver = Driver(compression, transport, new_feedback, kernels=kernels.variant())
        self._averages = average

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
        driver = self.driver
        try:
            arrays = arrays_of(gradients)
            shapes = shapes_of(arrays)
            if shapes != self._shapes:
                raise ValueError(f"gradients must be like those of the first call, {self._shapes}, got {shapes}")
            driver.begin()
            # The last array comes first, because buckets are packed so. The first call fixed the order: MPI matches by order.
            for name in reversed(self._shapes):
                driver.add(name, arrays[name], learning_rate)
            reduced = {name: np.zeros(shape, dtype) for name, (shape, dtype) in self._shapes.items()}
        except BaseException:
            if driver.step is None:
                # The others wait for this worker's part of the step.
                driver.begin()
            driver.give_up()
            raise
        driver.complete()
        driver.finish(partial(write_to, reduced))
        return reduced

    def _plan(self, gradients: Mapping[str, Array]) -> None:
        """Fix names, shapes and types. Raise ValueError first, on every worker, if a state to be loaded does not fit."""
        transport, compressor = self._transport, self.driver.compressor
        arrays = [f"{name} {one.shape} {one.dtype}" for name, one in gradients.items()]
        mine = description(compressor, arrays, average=str(self._averages))
        compare(mine, transport.everyone(mine), transport.rank)
        self.driver.extend(parameters_of(gradients, compressor), gradients)
        self._shapes = shapes_of(gradients)

    def __repr__(self) -> str:
        return f"SparseAllreduce({self.driver.compressor!r})"

    @property
    def steps(self) -> int:
        """Number of steps that `stats` counts, without the cost of computing the rest."""
        return 0 if self.driver.feedback is None else self.driver.feedback.steps

    def stats(self) -> Stats:
        """Compute counts, bytes and residual norms per bucket and in total, of the last step and on average."""
        return self.driver.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's residuals and adaptive state by array name, once there was a first call."""
        return self.driver.state_dict()

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
            check_parts(state, self.driver.compressor)
            self.driver.defer(state)
            try:
                self._plan(arrays_of(gradients))
            except BaseException:
                self.driver.deferred = None
                raise
            return
        self.driver.load(state)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals, because gradients will be `factor` times as large from now on; `factor` > 0."""
        check_factor(factor)
        self.driver.rescale(factor)

    def reset(self) -> None:
        """Forget residuals, adaptive state and statistics."""
        self.driver.reset()


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


def parameters_of(gradients: Mapping[str, Array], compressor: Compressor) -> list[Parameter]:
    """Return what planning needs to know of arrays."""
    return [
        Parameter(name, gradient.shape, compressor.residual_dtype_of(gradient), "cpu")
        for name, gradient in gradients.items()
    ]


def write_to(reduced: Mapping[str, Array], slots: Sequence[Slot], sent: Reduced) -> None:
    """Write reduced gradients to the arrays `reduced`, which are contiguous."""
    sent.write([(slot.offset, reduced[slot.name].reshape(-1)) for slot in slots])
