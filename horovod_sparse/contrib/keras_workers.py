"""Who exchanges the movements of local updates in Keras, and what is refused: NumPy arrays, by Horovod's collectives.

Tested by tests/parallel/tf/local.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import global_process_set, mpi_ops
from numpy.typing import NDArray

from horovod_sparse import kernels
from horovod_sparse.core.binding import compresses
from horovod_sparse.core.driver import Driver
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.core.state import empty_state, names_in
from horovod_sparse.core.step import Wait
from horovod_sparse.exchange.protocols import Collective, Named
from horovod_sparse.numpy.allreduce import parameters_of, write_to
from horovod_sparse.numpy.compiled import host_ops
from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.exchange import gather_json
from horovod_sparse.tensorflow.keras.optimizer import DistributedApply
from horovod_sparse.tensorflow.names import load_renamed, renamed

Array = NDArray[Any]


class Workers:
    """All workers of Horovod, as a `Transport` of NumPy arrays: one collective after the other, in the same order on all."""

    def __init__(self) -> None:
        self.world, self.position, self.rank = mpi_ops.size(), mpi_ops.rank(), mpi_ops.rank()

    def start(self, collective: Collective, name: str = "", bucket: Named | None = None) -> Wait:
        with tf.device("CPU:0"):
            message = tf.convert_to_tensor(collective.message)
            if collective.kind == "allgather":
                result = mpi_ops.allgather(message)
            else:
                result = mpi_ops._allreduce(message, op=mpi_ops.Sum)
        wait: Wait = result.numpy
        return wait

    def everyone(self, value: Any) -> list[Any]:
        return gather_json(value, "horovod_sparse.local_updates", global_process_set)


class VariablesDriver(Driver):
    """A driver whose states may be of variables with other names: Keras numbers them anew."""

    def load(self, state: Mapping[str, Any]) -> None:
        load_renamed(self, state)


class MovementSource:
    """What an optimizer has moved variables. These may come later than others, or leave. What waits of those is set aside."""

    def __init__(self, compressor: TensorflowCompressor) -> None:
        self.compressor = compressor
        self.workers = workers = Workers()
        self.active = compresses(workers.world)
        place = {"world": workers.world, "position": workers.position, "rank": workers.rank}
        new_feedback = partial(Feedback, host_ops(), compressor, **place)
        self.driver = VariablesDriver(compressor, workers, new_feedback, kernels=kernels.variant())
        compressor.bind(self)

    def exchange(self, movements: Mapping[str, Array]) -> None:
        """Replace the movements, by name, by their means over the workers, in their own memory."""
        driver, feedback = self.driver, self._extended(movements)
        driver.begin()
        reached = {feedback.bucket_of[name].name for name in movements}
        absent: dict[str, Array] = {}
        for bucket in feedback.buckets:
            for name, slot in bucket.slots.items() if bucket.name in reached else ():
                driver.add(name, movements.get(name))
                if name not in movements:
                    # Of a variable that is set aside nobody has a movement.
                    absent[name] = np.empty(slot.shape, np.float32)
        driver.complete()
        driver.finish(partial(write_to, {**absent, **movements}))

    def waiting(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
        """Return what waits of variables with these shapes, by name; between two exchanges, or before the first one."""
        driver = self.driver
        if driver.feedback is not None:
            return driver.feedback.residuals.views
        found: dict[str, Array] = renamed(driver.deferred or empty_state(), shapes)["residuals"]
        return found

    def _extended(self, movements: Mapping[str, Array]) -> Feedback:
        """Return what lasts, with buckets for those that have none yet, and with what a state has of them."""
        driver, known = self.driver, () if self.driver.feedback is None else self.driver.feedback.bucket_of
        new = {name: one for name, one in movements.items() if name not in known}
        if new or driver.feedback is None:
            deferred = driver.deferred = renamed(driver.deferred or empty_state(), new)
            driver.extend(parameters_of(new, self.compressor), new, later=names_in(deferred))
        assert driver.feedback is not None
        return driver.feedback


def check_model(model: Any, optimizer: Any, every: int) -> None:
    """Raise ValueError if a model, or the optimizer that steps it, does not go with local updates."""
    if optimizer.use_ema:
        raise ValueError(
            f"use_ema of optimizer {optimizer.name!r} must be False with LocalUpdates, got True: each worker would average its "
            "own variables; average them in a callback after LocalUpdates"
        )
    if isinstance(vars(optimizer).get("apply"), DistributedApply):
        raise ValueError(
            f"optimizer must be a plain one with LocalUpdates, but {optimizer.name!r} is distributed: its gradients would be "
            "averaged too; leave hvd.DistributedOptimizer out"
        )
    steps = model.steps_per_execution
    if every % steps:
        raise ValueError(
            f"every must be a multiple of steps_per_execution={steps} of compile(), got {every}: Keras calls callbacks after "
            f"so many batches only; give every={steps}"
        )
