"""Scenarios: states. What is loaded continues bit for bit."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from horovod_sparse.tensorflow import SIDCo

from ..scenario import TF_2, scenario, warned
from .common import assert_identical, everyone, tape_gradient
from .keras3 import BATCH, compiled, fit


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

    def saved(self) -> bytes:
        """What this rank saves, in the bytes of a file."""
        return pickle.dumps(([one.numpy() for one in self._variables], self.compression.state_dict()))

    def load(self, saved: bytes) -> None:
        values, state = pickle.loads(saved)
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)
        self.compression.load_state_dict(state)

    @property
    def _variables(self) -> list[Any]:
        return [*self.variables, *self.optimizer.variables, self.noise.state]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs = self.noise.normal((BATCH, 16))
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
def what_was_saved_of_a_loop_continues_bit_for_bit() -> None:
    first = Loop()
    first.train(5)
    saved = first.saved()
    first.train(5)
    for trained in (0, 2):
        second = Loop()
        second.train(trained)
        second.load(saved)
        second.train(5)
        np.testing.assert_equal(second.kept, first.kept)
    assert_identical(second.weights)
    assert len(set(everyone(second.mean.numpy().tobytes()))) == hvd.size(), "the scenario tests nothing"


@scenario(TF_2)
def a_state_that_was_left_out_is_noticed() -> None:
    """By the steps that the optimizer has counted, which counts passes."""
    for iterations, passes, eagerly, loads, rank in (
        (3, 1, False, False, 0),
        (3, 1, True, False, 0),
        (3, 1, False, True, None),
        # The first step comes in the last pass.
        (0, 4, True, False, None),
        (12, 4, True, False, 0),
    ):
        states: list[dict[str, Any]] = []
        for begins in (True, False):
            compression = SIDCo(0.05)
            adam = keras.optimizers.Adam(0.01)
            optimizer = hvd.DistributedOptimizer(adam, compression=compression, backward_passes_per_step=passes)
            model = compiled(optimizer, builds=True, run_eagerly=eagerly)
            if not begins:
                optimizer.iterations.assign(iterations)
                if loads:
                    compression.load_state_dict(states[0])
            texts = warned(lambda model=model, passes=passes: fit(model, range(2 * passes)))
            states.append(compression.state_dict())
            found = [text for text in texts if "no state of" in text]
            assert len(found) == (not begins and hvd.rank() == rank), (iterations, passes, loads, begins, texts)
            assert all("the optimizer has made 3 steps" in text for text in found), found
