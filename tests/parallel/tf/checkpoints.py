"""Scenarios: checkpoints of a whole training. What is resumed continues bit for bit; what does not fit raises on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow as ours
import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.core.checkpoint import Workers
from horovod_sparse.tensorflow import SIDCo, TopK, checkpoint

from ..scenario import TF_2, folder_of, scenario, warned
from .common import MakeCompression, assert_identical, everyone, raised, tape_gradient
from .keras3 import BATCH, LOSS, adam, fit

BATCHES, EPOCHS = 6, 3


class Training:
    """A training in which everything that can be kept from step to step matters."""

    def __init__(self, compression: Any, optimizer: Any, **settings: Any) -> None:
        # As in a new process.
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        layers = [
            keras.layers.Dense(64),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("relu"),
            keras.layers.Dropout(0.2, seed=100 + hvd.rank()),
            keras.layers.Dense(48),
            keras.layers.Dense(10),
        ]
        self.model = keras.Sequential([keras.Input((16,)), *layers])
        self.compression = compression
        self.model.compile(hvd.DistributedOptimizer(optimizer, compression=compression, **settings), loss=LOSS)
        self.epochs: list[int] = []
        """Those that were trained."""

    def fit(self, *callbacks: Any, first: int = 0, epochs: int = EPOCHS) -> None:
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        given: dict[str, Any] = {"initial_epoch": first, "epochs": epochs, "callbacks": [broadcast, *callbacks]}
        self.epochs += fit(self.model, range(BATCHES), **given).epoch

    @property
    def kept(self) -> Any:
        variables = [*self.model.variables, *self.model.optimizer.variables]
        return [one.numpy() for one in variables], self.compression.state_dict()


def _sgd() -> Any:
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.05, EPOCHS * BATCHES))


@scenario(
    TF_2,
    cases={
        "updates": (lambda: SIDCo(0.02, warmup=None), adam, {}),
        # When the first and the third epoch end, gradients are being summed.
        "passes": (lambda: TopK(0.02, warmup=None, updates=False), adam, {"backward_passes_per_step": 4}),
    },
)
def keras_resumes_bit_for_bit(
    make: MakeCompression, make_optimizer: Callable[[], Any], settings: dict[str, Any]
) -> None:
    def saved() -> list[int]:
        everyone(None, "saved")
        return sorted(int(path.name[5:]) // BATCHES for path in folder.glob("step-*"))

    with folder_of(hvd.rank(), everyone) as folder:
        whole = Training(make(), make_optimizer(), **settings)
        saves = hvd.callbacks.CheckpointCallback(folder, every=1 if settings else 2)
        whole.fit(saves)
        assert saved() == [2] and whole.epochs == [0, 1, 2]
        training = Training(make(), make_optimizer(), **settings)
        training.fit(hvd.callbacks.CheckpointCallback(folder))
        assert training.epochs == [2]
        np.testing.assert_equal(training.kept, whole.kept)
        replicated = "updates" not in training.compression.state_dict()
        assert_identical(
            [*training.model.trainable_variables, *(training.model.optimizer.variables if replicated else ())]
        )
        own = [one.numpy().tobytes() for one in training.model.non_trainable_variables]
        assert everyone(own)[0] != everyone(own)[1], "the scenario tests nothing"
        # The same callback goes on with what is there, and not with the checkpoint.
        whole.fit(saves, first=EPOCHS, epochs=EPOCHS + 1)
        assert whole.epochs == [*range(EPOCHS + 1)]
        assert saved() == ([2, 4] if settings else [2, 3, 4])


class Loop(tf.Module):
    """A loop of one's own with a tape."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [tf.Variable(tf.ones((16, 64)) / 8), tf.Variable(tf.ones((64, 10)) / 8)]
        self.mean = tf.Variable(tf.zeros(16), trainable=False)
        self.noise = tf.random.Generator.from_seed(hvd.rank())
        self.optimizer = keras.optimizers.Adam(0.01)
        self.optimizer.build(self.weights)
        self.compression = SIDCo(0.02, warmup=None)
        np.random.seed(hvd.rank())

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self, "optimizer": self.optimizer, "noise": self.noise, "compression": self.compression}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs = self.noise.normal((BATCH, 16)) + np.float32(np.random.normal())
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, 0))
            self.optimizer.apply(
                tape_gradient(partial(self.loss, inputs), self.weights, self.compression), self.weights
            )

    def loss(self, inputs: Any) -> Any:
        return tf.reduce_mean(tf.square((inputs - self.mean) @ self.weights[0] @ self.weights[1] - 1))

    @property
    def kept(self) -> Any:
        residuals = self.compression.state_dict()["residuals"]
        return [one.numpy() for one in self.variables], sorted(residuals.items())


@scenario(TF_2)
def loop_with_a_tape_resumes_bit_for_bit() -> None:
    with folder_of(hvd.rank(), everyone) as folder:
        first = Loop()
        assert ours.load_checkpoint(folder, **first.objects) == (0, {})
        first.train(5)
        ours.save_checkpoint(folder, 5, **first.objects, epoch=[1, "two"])
        first.train(5)
        second = Loop()
        # Also when variables have buckets already.
        second.train(2)
        found = ours.load_checkpoint(folder, **second.objects)
        assert found == (5, {"epoch": [1, "two"]})
        second.train(5)
        np.testing.assert_equal(second.kept, first.kept)
        assert_identical(second.weights)
        assert len(set(everyone(second.mean.numpy().tobytes()))) == hvd.size(), "the scenario tests nothing"


@scenario(TF_2)
def tensorflow_checkpoint_that_does_not_fit_raises_on_every_rank() -> None:
    with folder_of(hvd.rank(), everyone) as folder:
        loop = Loop()
        loop.train(2)
        ours.save_checkpoint(folder, 2, **loop.objects, epoch=1)
        loop.train(2)
        before, state = loop.kept, loop.compression.state_dict()

        def refused(**objects: Any) -> str:
            return raised(RuntimeError, lambda: ours.load_checkpoint(folder, **objects))

        assert "['other'] were not saved; it holds" in refused(other=loop)
        assert "leave it out and find it in values" in refused(epoch=3)
        # Only one rank has another model.
        narrow = tf.Module()
        narrow.weights = [tf.Variable(tf.zeros((2, 2))), *loop.variables[1:]]
        message = refused(model=loop if hvd.rank() == 0 else narrow, compression=loop.compression)
        assert message.startswith("the checkpoint failed: rank 1:") and "shape (2, 2)" not in message.split("got")[0]
        np.testing.assert_equal(loop.kept, before)
        np.testing.assert_equal(loop.compression.state_dict(), state)
        error = raised(ValueError, lambda: ours.save_checkpoint(folder, 3, value=object()))
        assert "value must be a value that JSON can express or have variables, got object" in error


@scenario(TF_2)
def fewer_workers_keep_the_sum_of_the_residuals() -> None:
    """One worker continues what two have saved. A worker that is new keeps its own random numbers, and has no residual."""
    with folder_of(hvd.rank(), everyone) as folder:
        loop = Loop()
        loop.train(4)
        ours.save_checkpoint(folder, 4, **loop.objects)
        residuals = everyone(loop.compression.state_dict()["residuals"])
        for size, rank, gather in ((1, 0, lambda value: [value]), (3, 2 * hvd.rank(), everyone)):
            other, is_new = Loop(), rank == 2
            with mock.patch.object(checkpoint.checkpoints, "workers", return_value=Workers(rank, size, gather)):
                texts = warned(lambda other=other: ours.load_checkpoint(folder, **other.objects))
            loaded = other.compression.state_dict()["residuals"]
            assert loaded.keys() == residuals[0].keys()
            for name, one in loaded.items():
                total = residuals[0][name] + residuals[1][name] if size == 1 else residuals[0][name]
                np.testing.assert_array_equal(one, np.zeros_like(one) if is_new else total)
            same = np.array_equal(other.noise.state.numpy(), Loop().noise.state.numpy())
            assert same == is_new
            assert len(texts) == (rank == 0), texts
