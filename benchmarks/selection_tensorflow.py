"""A step through TensorFlow's shared CPU path, in one process, from the gradient to the reduced gradient."""

from __future__ import annotations

import math
import time
from typing import Any

import tensorflow as tf
from selection_worker import Case, Conditions, Gradients

from horovod_sparse.core.layout import Parameter, layouts_of
from horovod_sparse.exchange.protocols import Kind
from horovod_sparse.tensorflow.exchange import Collectives
from horovod_sparse.tensorflow.host import HostPipeline, Step


class _Alone(Collectives):
    """Collectives of a single worker, which gathers and sums only its own messages, without Horovod."""

    def __init__(self) -> None:
        super().__init__(None)

    def result(self, kind: Kind, message: Any, name: str, to: Any = None) -> Any:
        return message


class GraphWorker:
    """A worker whose steps run in a `tf.function`, called by itself or from within a user's `tf.function`."""

    def __init__(self, case: Case, conditions: Conditions, gradients: Gradients, *, traced: bool) -> None:
        # Before anything else, and the same in all of this process.
        tf.config.threading.set_intra_op_parallelism_threads(conditions.threads)
        compressor: Any = case.make(conditions.ratio)
        self._gradients = gradients
        self._engine = HostPipeline(compressor, _Alone(), world=1, position=0, rank=0)
        self._engine.add_buckets(layouts_of([Parameter("p", (conditions.size,), "float32", "cpu")], compressor))
        inner = tf.function(self._reduce, autograph=False)
        # With `traced`, as in a training step that the user has made a `tf.function`.
        self._run = tf.function(lambda gradient: tf.identity(inner(gradient)), autograph=False) if traced else inner
        for _ in range(case.warm_steps):
            self.run()

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

    def run(self) -> float:
        """Take a step with a new gradient, and return its seconds."""
        tensor = tf.constant(self._gradients.next().numpy())
        begun = time.perf_counter()
        self._run(tensor)
        return time.perf_counter() - begun
