"""A step through TensorFlow's shared CPU path, in one process, from the gradient to the reduced gradient."""

from __future__ import annotations

import math
import time
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray
from selection_rows import Conditions, Row

from horovod_sparse.core.layout import Parameter, layouts_of
from horovod_sparse.tensorflow.exchange import Collectives
from horovod_sparse.tensorflow.host import HostPipeline, Step


def set_threads(threads: int) -> None:
    """Set the number of threads. Call this before anything else, once per process."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)


class _Alone(Collectives):
    """Collectives of a single worker, which gathers and sums only its own messages, without Horovod."""

    def __init__(self) -> None:
        super().__init__(None)

    def allgather(self, message: Any, name: str) -> Any:
        return message

    def allreduce(self, message: Any, name: str) -> Any:
        return message


class GraphWorker:
    """A worker whose steps run in a `tf.function`, called by itself or from within a user's `tf.function`."""

    def __init__(self, row: Row, conditions: Conditions, *, traced: bool) -> None:
        compressor: Any = row.make(conditions.ratio)
        self._engine = HostPipeline(compressor, _Alone(), world=1, position=0, rank=0)
        self._engine.add_buckets(layouts_of([Parameter("p", (conditions.size,), "float32", "cpu")], compressor))
        inner = tf.function(self._reduce, autograph=False)
        # With `traced`, as in a training step that the user has made a `tf.function`.
        self._run = tf.function(lambda gradient: tf.identity(inner(gradient)), autograph=False) if traced else inner

    def _reduce(self, gradient: Any) -> Any:
        step = Step(
            buckets=self._engine.buckets,
            gradients={"p": gradient},
            others={},
            dtypes={"p": tf.float32},
            rate=tf.constant(math.nan, tf.float64),
            scale=tf.constant(math.nan, tf.float64),
        )
        return self._engine.reduce(step)["p"]

    def step(self, gradient: NDArray[Any]) -> float:
        """Take a step and return its seconds."""
        tensor = tf.constant(gradient)
        begun = time.perf_counter()
        self._run(tensor)
        return time.perf_counter() - begun
