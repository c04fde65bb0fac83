"""Who exchanges the movements of local updates in Keras, and what is refused: NumPy arrays, by Horovod's collectives."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import global_process_set, mpi_ops
from numpy.typing import NDArray

from horovod_sparse.core.agreement import agree_on_states
from horovod_sparse.core.binding import compresses
from horovod_sparse.core.intake import Arrived
from horovod_sparse.core.pipeline import AnyBucket, Pipeline, Wait
from horovod_sparse.core.state import check_state, empty_state, kept_shapes, merged, names_in, part_of
from horovod_sparse.core.store import Store
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.numpy.allreduce import add_buckets, write_to
from horovod_sparse.numpy.compiled import host_ops
from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.exchange import gather_json
from horovod_sparse.tensorflow.keras.optimizer import DistributedApply
from horovod_sparse.tensorflow.names import renamed

Array = NDArray[Any]


class Workers:
    """All workers of Horovod, as a `Transport` of NumPy arrays: one collective after the other, in the same order on all."""

    def __init__(self) -> None:
        self.world, self.position, self.rank = mpi_ops.size(), mpi_ops.rank(), mpi_ops.rank()

    def start(self, collective: Collective, name: str = "", bucket: AnyBucket | None = None) -> Wait:
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


class MovementReducer(Store):
    """Reduces the movements of variables, which may come later than others, or leave. What waits of those is set aside."""

    def __init__(self, compressor: TensorflowCompressor) -> None:
        self.compressor = compressor
        self.workers = Workers()
        self.active = compresses(self.workers.world)
        compressor.bind(self)

    def exchange(self, movements: Mapping[str, Array]) -> None:
        """Replace the movements, by name, by their means over the workers, in their own memory."""
        pipeline = self._extended(movements)
        pipeline.start_step()
        under_way: list[tuple[AnyBucket, Wait]] = []
        for bucket in pipeline.all_buckets:
            arrived = [Arrived(name, movements.get(name)) for name in bucket.slots]
            if any(gradient is not None for _, gradient, _ in arrived):
                pipeline.arrive_together(bucket, arrived)
                under_way.append((bucket, self._start(bucket, bucket.begin())))
        pipeline.complete(under_way, self._start)
        # Of a variable that is set aside nobody has a movement.
        slots = [slot for one, _ in under_way for slot in one.layout.slots if slot.name not in movements]
        absent = {slot.name: np.empty(slot.shape, np.float32) for slot in slots}
        pipeline.end_step(partial(write_to, {**absent, **movements}), self.workers.everyone)

    def waiting(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
        """Return what waits of variables with these shapes, by name; between two exchanges, or before the first one."""
        if self.pipeline is not None:
            return self.pipeline.residuals.views
        residuals, _ = kept_shapes(shapes, self.compressor)
        found: dict[str, Array] = renamed(self.deferred or empty_state(), residuals)["residuals"]
        return found

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        names = set() if self.pipeline is None else {*self.pipeline.bucket_of}
        self._load(renamed(state, names) if names else state, names)

    def _start(self, bucket: AnyBucket, collective: Collective) -> Wait:
        return self.workers.start(collective)

    def _extended(self, movements: Mapping[str, Array]) -> Pipeline:
        """Return the pipeline, with buckets for those that have none yet, and with what a state has of them."""
        pipeline, compressor, workers = self.pipeline, self.compressor, self.workers
        new = {name: one for name, one in movements.items() if pipeline is None or name not in pipeline.bucket_of}
        if not new and pipeline is not None:
            return pipeline
        residuals, _ = kept_shapes({name: one.shape for name, one in new.items()}, compressor)
        deferred = renamed(self.deferred or empty_state(), residuals)
        mine = part_of(deferred, residuals)

        def check() -> None:
            if names_in(mine):
                check_state(mine, compressor, residuals, {})

        agree_on_states(check, mine, workers)
        if pipeline is None:
            place = {"world": workers.world, "position": workers.position, "rank": workers.rank}
            pipeline = Pipeline(host_ops(), compressor, **place)
        add_buckets(pipeline, new)
        self.pipeline = pipeline
        if names_in(mine):
            self.load_compression_state(merged(pipeline.state_dict(), deferred))
        return pipeline


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
