"""What a worker of an elastic job does, with TensorFlow.

horovodrun ... python -m parallel.tf.elastic tape|keras HOSTS

HOSTS is the file that the discovery script prints. Functions are traced once, before any worker dies or comes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Protocol

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_sparse.tensorflow import DGC, MiCRO, SIDCo

from ..hosts import MOST, after, begin_step, goes_on
from .common import assert_identical, normals

SHAPES = {"first": (32, 64), "bias": (64,), "second": (64, 40)}
ROWS = 50
"""Of the embedding, whose gradient is sparse."""
BUCKET_BYTES = 10_000


class Training(Protocol):
    state: Any
    compressions: dict[str, Any]

    def train(self, step: int) -> None:
        """Train one step."""

    def replicated(self) -> list[Any]:
        """What must be the same on all workers."""


class Tape:
    """Three trainings in step with each other, in one function."""

    def __init__(self) -> None:
        self.compressions = {
            "sidco": SIDCo(0.01, bucket_bytes=BUCKET_BYTES),
            "micro": MiCRO(0.01, bucket_bytes=BUCKET_BYTES),
            "dgc": DGC(0.01, bucket_bytes=BUCKET_BYTES),
        }
        self.variables = {
            name: {
                key: tf.Variable(normals(shape, step=0, rank=0), name=f"{name}_{key}") for key, shape in SHAPES.items()
            }
            for name in self.compressions
        }
        self.embedding = tf.Variable(normals((ROWS, 64), step=1, rank=0), name="embedding")
        everything = [self.embedding, *(one for some in self.variables.values() for one in some.values())]
        self.state = hvd.elastic.TensorFlowState(everything, **self.compressions, step=0)
        self.traced = 0
        self.run = tf.function(self._run)

    def _run(self, inputs: tf.Tensor, rows: tf.Tensor) -> None:
        self.traced += 1
        for name, compression in self.compressions.items():
            own = self.variables[name]
            # DGC refuses sparse gradients.
            variables = [*own.values(), *([self.embedding] if name == "sidco" else [])]
            with tf.GradientTape() as tape:
                hidden = tf.tanh(inputs @ own["first"] + own["bias"])
                if name == "sidco":
                    hidden += tf.gather(self.embedding, rows)
                loss = tf.reduce_mean(tf.square(hidden @ own["second"]))
            tape = hvd.DistributedGradientTape(tape, compression=compression)
            for gradient, variable in zip(tape.gradient(loss, variables), variables, strict=True):
                if isinstance(gradient, tf.IndexedSlices):
                    variable.scatter_sub(tf.IndexedSlices(0.05 * gradient.values, gradient.indices))
                else:
                    variable.assign_sub(0.05 * gradient)

    def train(self, step: int) -> None:
        inputs = normals((16, 32), step=step, rank=hvd.rank())
        rows = np.random.default_rng((step, hvd.rank())).integers(ROWS, size=16)
        self.run(tf.constant(inputs), tf.constant(rows))
        assert self.traced == 1

    def replicated(self) -> list[Any]:
        return [*self.state.variables, self.compressions["dgc"].state_dict()["velocities"]["dgc_bias"]]


class Keras:
    """A model that Keras trains, with Horovod's callbacks."""

    def __init__(self) -> None:
        import horovod.tensorflow.keras as hvd_keras
        import keras

        keras.utils.set_random_seed(1)
        self.model = keras.Sequential(
            [keras.Input((32,)), keras.layers.Dense(64, "tanh"), keras.layers.Dropout(0.1), keras.layers.Dense(40)]
        )
        self.compressions = {"sidco": SIDCo(0.01, bucket_bytes=BUCKET_BYTES)}
        optimizer = hvd_keras.DistributedOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9), compression=self.compressions["sidco"]
        )
        self.model.compile(optimizer, "mse", jit_compile=False)
        self.state = hvd_keras.elastic.KerasState(self.model, step=0, batch=0, epoch=0)
        self.callbacks = [
            hvd_keras.elastic.UpdateBatchStateCallback(self.state),
            hvd_keras.elastic.UpdateEpochStateCallback(self.state),
        ]

    def train(self, step: int) -> None:
        inputs, targets = (normals((16, size), step=step, rank=hvd.rank(), salt=size) for size in (32, 40))
        self.model.fit(inputs, targets, batch_size=16, verbose=0, callbacks=self.callbacks)

    def replicated(self) -> list[Any]:
        return [variable.numpy() for variable in (*self.model.weights, *self.model.optimizer.variables)]


def kept(training: Training) -> list[np.ndarray]:
    """Copies of this worker's residuals and velocities."""
    states = [compression.state_dict() for compression in training.compressions.values()]
    return [array for state in states for part in ("residuals", "velocities") for array in state[part].values()]


def main(training: Training, hosts: Path) -> None:
    committed: dict[int, list[np.ndarray]] = {}
    """This worker's residuals and velocities, by step."""
    trained: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        print(f"rank {hvd.rank()} of {hvd.size()} begins at step {state.step}", flush=True)
        for before, now in zip(committed.get(state.step, kept(training)), kept(training), strict=True):
            np.testing.assert_array_equal(now, before, "a survivor's residuals have changed")
        while goes_on(state.step, hvd.size()):
            begin_step(hosts, state.step, hvd.rank())
            training.train(state.step)
            assert_identical(training.replicated())
            for compression in training.compressions.values():
                pipeline = compression.server.pipeline
                assert (pipeline.world, pipeline.position) == (hvd.size(), hvd.rank())
            state.step = after(state.step, hvd.size())
            committed[state.step] = kept(training)
            state.commit()
            trained.append(hvd.size())
            assert len(trained) < MOST

    train(training.state)
    print(f"rank {hvd.rank()} trained with {sorted(set(trained))} workers, and ended with {hvd.size()}", flush=True)


if __name__ == "__main__":
    hvd.init()
    main({"tape": Tape, "keras": Keras}[sys.argv[1]](), Path(sys.argv[2]))
