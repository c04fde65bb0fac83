"""Scenarios: programs as users of Keras write them, which must train by local updates as they do by dense averages.

With SGD without momentum, `every=1` and everything sent, the variables are those of dense averages. With AdamW and a small
ratio, the loss is near dense AdamW's, and the variables are equal on all ranks to the bit whenever they are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.tensorflow.keras import LocalUpdates, SIDCo

from ..scenario import TF_2, TF_4, TF_GLOO_2, scenario
from .common import assert_identical
from .keras3 import BATCH, LOSS, small_model, two_layers
from .local import After, same, same_after, task
from .programs import optimizers_of_keras

STEPS = 24
EAGERLY = {"run_eagerly": True}
"""How programs are compiled that do not need a graph, which takes seconds to trace."""
Models = list[Any]


@dataclass(frozen=True)
class Way:
    """How a program's optimizer becomes one of all workers: by a callback, or else by Horovod's dense averages."""

    make: Callable[..., Any]
    """Makes the optimizer, from settings of Keras."""
    local: Callable[..., LocalUpdates] | None = None
    """Makes the callback."""

    def distributed(self, optimizer: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer) if self.local is None else optimizer

    def optimizer(self, **settings: Any) -> Any:
        return self.distributed(self.make(**settings))

    def callbacks(self) -> list[Any]:
        """With one that raises unless all workers have the same variables, to the bit, when they are shared."""
        if self.local is None:
            return []
        local = self.local()
        return [local, After(batch=same_after(local.every), test=same, epoch=same)]

    def compile(self, model: Any, optimizer: Any = None, **arguments: Any) -> Any:
        model.compile(optimizer or self.optimizer(), loss=LOSS, **arguments or EAGERLY)
        return model

    def fit(self, model: Any, callbacks: Iterable[Any], steps: Iterable[int] = range(STEPS), **arguments: Any) -> None:
        inputs, labels = task(steps)
        model.fit(inputs, labels, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[*callbacks], **arguments)

    def train(self, model: Any, *more: Any, optimizer: Any = None, **arguments: Any) -> Models:
        """All of training; `more` are callbacks after that of local updates."""
        self.fit(self.compile(model, optimizer, **arguments), [*self.callbacks(), *more])
        return [model]


Program = Callable[[Way], Models]


class Own(keras.Model):
    """A model with a `train_step` of its own, in which functions are called between the gradient and the step, and after it."""

    def __init__(self, inner: Any, **calls: Callable[[Any], object]) -> None:
        super().__init__()
        self.inner, self.calls = inner, calls

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)

    def gradients(self, inputs: Any, labels: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = LOSS(labels, self(inputs))
        found: list[Any] = tape.gradient(loss, self.trainable_variables)
        return found

    def train_step(self, batch: Any) -> dict[str, Any]:
        gradients = self.gradients(*batch)
        for variable in self.trainable_variables:
            self.calls.get("between", lambda _: None)(variable)
        self.optimizer.apply(gradients, self.trainable_variables)
        for variable in self.trainable_variables:
            self.calls.get("after", lambda _: None)(variable)
        return {"steps": self.optimizer.iterations}


def clamp(variable: Any, largest: float = 0.1) -> None:
    variable.assign(keras.ops.clip(variable, -largest, largest))


# --- programs ---


def plain(way: Way) -> Models:
    return way.train(two_layers(), run_eagerly=False)


def eagerly(way: Way) -> Models:
    return way.train(two_layers(), **EAGERLY)


def several_steps_per_execution(way: Way) -> Models:
    return way.train(two_layers(), steps_per_execution=4)


def a_schedule_from_zero_to_zero(way: Way) -> Models:
    rate = float(way.make().learning_rate)
    schedule = keras.optimizers.schedules.CosineDecay(0.0, STEPS - 8, warmup_target=rate, warmup_steps=3)
    return way.train(two_layers(), optimizer=way.optimizer(learning_rate=schedule))


def a_callback_sets_the_rate(way: Way) -> Models:
    """To zero at first, and at last."""
    model, rate = way.compile(two_layers()), float(way.make().learning_rate)
    callbacks = way.callbacks()
    for epoch in range(6):
        schedule = keras.callbacks.LearningRateScheduler(lambda epoch: rate * (epoch % 5 > 0))
        way.fit(model, [*callbacks, schedule], range(4 * epoch, 4 * epoch + 4), initial_epoch=epoch, epochs=epoch + 1)
    return [model]


def a_rate_that_falls_on_a_plateau(way: Way) -> Models:
    """In the mean over the workers: otherwise they would have different rates."""
    model = way.compile(two_layers())
    average, fall = (
        hvd.callbacks.MetricAverageCallback(),
        keras.callbacks.ReduceLROnPlateau("loss", 0.5, 1, min_delta=10.0),
    )
    way.fit(model, [*way.callbacks(), average, fall], range(STEPS // 4), epochs=4)
    assert float(model.optimizer.learning_rate) < 0.99 * float(way.make().learning_rate)
    return [model]


def accumulation(way: Way) -> Models:
    return way.train(two_layers(), optimizer=way.optimizer(gradient_accumulation_steps=2))


def clipping(way: Way) -> Models:
    """Each worker clips its own gradients."""
    return way.train(two_layers(), optimizer=way.optimizer(global_clipnorm=0.05))


def constraints(way: Way) -> Models:
    keras.utils.set_random_seed(1)
    bound = keras.constraints.MaxNorm(1.0)
    layers = [keras.layers.Dense(96, activation="relu", kernel_constraint=bound), keras.layers.Dense(10)]
    models = way.train(keras.Sequential([keras.Input((16,)), *layers]))
    assert np.linalg.norm(layers[0].kernel, axis=0).max() < 1.0 + 1e-5
    return models


def two_optimizers_of_keras(way: Way) -> Models:
    """One for the kernels and one, with another rate, for the biases: Keras has no groups."""
    mine = way.make(learning_rate=0.02)
    both = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(way.make(), {".*bias": mine}))
    return way.train(two_layers(), optimizer=way.distributed(both))


def writes_between_gradient_and_step(way: Way) -> Models:
    """A clamp that changes nothing, and decay by hand."""

    def write(variable: Any) -> None:
        clamp(variable, 10.0)
        variable.assign(variable * 0.999)

    return way.train(Own(two_layers(), between=write))


def a_clamp_within_every_step(way: Way) -> Models:
    """As a Wasserstein GAN's."""
    return way.train(Own(two_layers(), after=clamp))


def a_clamp_after_every_batch(way: Way) -> Models:
    return way.train(two_layers(), After(batch=lambda model, _: [*map(clamp, model.trainable_variables)]))


class SharpnessAware(Own):
    """Two passes per step, the second at variables that the same perturbation has moved on all workers."""

    def gradients(self, inputs: Any, labels: Any) -> list[Any]:
        kept = [tf.identity(one.value) for one in self.trainable_variables]
        for one in self.trainable_variables:
            one.assign_add(0.01 * keras.ops.sign(one))
        found = super().gradients(inputs, labels)
        for one, value in zip(self.trainable_variables, kept, strict=True):
            one.assign(value)
        return found


def sharpness_aware(way: Way) -> Models:
    return way.train(SharpnessAware(two_layers()))


class HeadAndBody(Own):
    """Each with an optimizer of its own."""

    head_optimizer: Any

    def train_step(self, batch: Any) -> dict[str, Any]:
        gradients, variables = self.gradients(*batch), self.trainable_variables
        self.optimizer.apply(gradients[:-2], variables[:-2])
        self.head_optimizer.apply(gradients[-2:], variables[-2:])
        return {"steps": self.optimizer.iterations}


def a_step_of_two_optimizers(way: Way) -> Models:
    model = HeadAndBody(two_layers())
    model.head_optimizer = way.optimizer(learning_rate=0.02)
    return way.train(model)


def weights_loaded_half_way(way: Way) -> Models:
    other = two_layers(seed=5)

    def load(model: Any, epoch: int) -> None:
        if epoch == 0:
            model.set_weights(other.get_weights())

    model = way.compile(two_layers())
    way.fit(model, [*way.callbacks(), After(epoch=load)], range(STEPS // 2), epochs=2)
    return [model]


def a_new_head(way: Way) -> Models:
    """And the same callback goes on."""
    model, callbacks = way.compile(two_layers()), way.callbacks()
    way.fit(model, callbacks, range(STEPS // 2))
    keras.utils.set_random_seed(6)
    tuned = keras.Sequential([keras.Input((16,)), *model.layers[:-1], keras.layers.Dense(10, name="new")])
    way.fit(way.compile(tuned), callbacks, range(STEPS // 2, STEPS))
    return [tuned]


def averages_of_weights(way: Way) -> Models:
    """By hand, at the end of epochs. In the middle of training they take the place of the variables, for an evaluation."""
    model, averages = way.compile(two_layers()), two_layers()

    def average(model: Any, epoch: int) -> None:
        for mean, one in zip(averages.weights, model.weights, strict=True):
            mean.assign(mean + (one - mean) * 0.3)
        if epoch == 1:
            kept = model.get_weights()
            model.set_weights(averages.get_weights())
            model.evaluate(*task(range(2)), verbose=0)
            model.set_weights(kept)

    way.fit(model, [*way.callbacks(), After(epoch=average)], range(STEPS // 3), epochs=3)
    assert_identical(averages.weights)
    return [model, averages]


def of_policy(policy: str, make: Callable[[], Any] = two_layers) -> Any:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return make()
    finally:
        keras.config.set_dtype_policy(before)


def mixed_precision(way: Way) -> Models:
    return way.train(of_policy("mixed_bfloat16"))


def variables_in_bfloat16(way: Way) -> Models:
    optimizer = way.make()
    if way.local is None:
        # Horovod averages no bfloat16 in TensorFlow.
        optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.NoOp())
    return way.train(of_policy("bfloat16"), optimizer=optimizer)


def a_loss_scaler(way: Way) -> Models:
    scaler = keras.optimizers.LossScaleOptimizer(way.make(), initial_scale=2.0**8)
    return way.train(of_policy("mixed_float16"), optimizer=way.distributed(scaler))


class Tied(keras.Model):
    """Layers with one matrix, of which a bias is not trained, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        dense = partial(keras.layers.Dense, activation="tanh")
        self.body, self.head, self.unused = dense(16), keras.layers.Dense(10), dense(30)
        self.shift = self.add_weight(shape=(16,), initializer="ones", trainable=False)
        self.body.build((None, 16))
        self.head.build((None, 16))
        self.unused.build((None, 30))

    def call(self, inputs: Any) -> Any:
        return self.head(self.body(self.body(inputs) + 0.1 * self.shift))


def tied_unused_and_frozen_variables(way: Way) -> Models:
    return way.train(Tied())


def an_embedding(way: Way) -> Models:
    """Of what is left of the inputs when they are rounded."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Discretization([-1.0, -0.3, 0.3, 1.0]), keras.layers.Embedding(5, 8), keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]  # fmt: skip
    return way.train(keras.Sequential([keras.Input((16,)), *layers]))


def normalization_and_dropout(way: Way) -> Models:
    keras.utils.set_random_seed(1)
    between = [keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dropout(0.1)]
    return way.train(keras.Sequential([keras.Input((16,)), keras.layers.Dense(96), *between, keras.layers.Dense(10)]))


def layers_that_thaw_and_freeze(way: Way) -> Models:
    model, callbacks = small_model(), way.callbacks()
    for stage in range(3):
        model.layers[0].trainable, model.layers[1].trainable = stage != 0, stage != 2
        way.fit(way.compile(model), callbacks, range(8 * stage, 8 * stage + 8))
    return [model]


def two_models_in_turns(way: Way) -> Models:
    models = [way.compile(two_layers(seed)) for seed in (1, 2)]
    callbacks = [way.callbacks() for _ in models]
    for part in range(3):
        for model, its in zip(models, callbacks, strict=True):
            way.fit(model, its, range(8 * part, 8 * part + 8))
    return models


def a_loop_of_ones_own(way: Way) -> Models:
    model = way.compile(two_layers())
    callbacks = keras.callbacks.CallbackList(way.callbacks(), model=model)
    callbacks.on_train_begin()
    for step in range(STEPS):
        callbacks.on_train_batch_begin(step)
        model.train_on_batch(*task([step]))
        callbacks.on_train_batch_end(step)
    callbacks.on_train_end()
    return [model]


PROGRAMS: tuple[Program, ...] = (
    plain,
    eagerly,
    several_steps_per_execution,
    a_schedule_from_zero_to_zero,
    a_callback_sets_the_rate,
    a_rate_that_falls_on_a_plateau,
    accumulation,
    clipping,
    constraints,
    two_optimizers_of_keras,
    writes_between_gradient_and_step,
    a_clamp_within_every_step,
    a_clamp_after_every_batch,
    sharpness_aware,
    a_step_of_two_optimizers,
    weights_loaded_half_way,
    a_new_head,
    averages_of_weights,
    mixed_precision,
    variables_in_bfloat16,
    a_loss_scaler,
    tied_unused_and_frozen_variables,
    an_embedding,
    normalization_and_dropout,
    layers_that_thaw_and_freeze,
    two_models_in_turns,
    a_loop_of_ones_own,
)

# --- laws ---


SGD = partial(keras.optimizers.SGD, learning_rate=0.1)
ADAMW = partial(keras.optimizers.AdamW, learning_rate=0.01, weight_decay=0.1)
OF_ITS_OWN = (clipping, constraints, a_clamp_within_every_step)
"""Where each worker clips or clamps what is its own, the mean is another one than dense training's."""
COARSE = {mixed_precision: 2.0**-8, a_loss_scaler: 2.0**-11, variables_in_bfloat16: STEPS * 2.0**-8}
"""By which part of the largest entry variables may be off: activations have so few bits, or variables, whose movement is
rounded in every step on its worker, and once more when it arrives."""


def sparse() -> Any:
    return SIDCo(0.1, min_numel=0, granularity=10_000, warmup=2.0)


def by_callback(make: Callable[..., Any], compression: Callable[[], Any] = sparse, **given: Any) -> Way:
    return Way(make, lambda: LocalUpdates(compression(), **given))


def of(programs: Iterable[Program]) -> dict[str, tuple[Program]]:
    return {one.__name__: (one,) for one in programs}


@scenario(TF_2, TF_4, cases=of(one for one in PROGRAMS if one not in OF_ITS_OWN))
def keras_local_updates_that_send_all_are_dense(program: Program) -> None:
    dense, found = program(Way(SGD)), program(by_callback(SGD, lambda: None))
    for model, other in zip(found, dense, strict=True):
        for mine, theirs in zip(model.trainable_variables, other.trainable_variables, strict=True):
            mine, theirs = (one.numpy().astype(np.float32) for one in (mine, theirs))
            atol = COARSE[program] * abs(theirs).max() if program in COARSE else 1e-6
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=atol)


def loss_of(models: Models) -> float:
    inputs, labels = task(range(90, 110), rank=9)
    return float(np.mean([np.asarray(LOSS(labels, keras.ops.cast(one(inputs), "float32"))) for one in models]))


EVERY_FOURTH: dict[str, Any] = {"every": 4, "ahead": 0.5}
CASES: dict[str, tuple[Program, dict[str, Any]]] = {
    **{f"{one.__name__}, every fourth": (one, EVERY_FOURTH) for one in PROGRAMS},
    # Of the others the law above says more.
    **{f"{one.__name__}, every step": (one, {}) for one in (plain, *OF_ITS_OWN)},
}


@scenario(TF_2, TF_4, TF_GLOO_2, cases=CASES)
def keras_local_updates_end_near_dense(program: Program, settings: dict[str, Any]) -> None:
    begins, dense = loss_of([two_layers()]), loss_of(program(Way(ADAMW)))
    found = loss_of(program(by_callback(ADAMW, **settings)))
    # A quarter of what training has gained is more than any of these programs loses, and what diverges has lost all.
    assert found < dense + (begins - dense) / 4, (found, dense, begins)


@scenario(TF_2)
def keras_local_updates_of_every_optimizer_are_shared() -> None:
    for make in optimizers_of_keras().values():
        way = by_callback(make)
        model = way.compile(two_layers())
        way.fit(model, way.callbacks(), range(4))
        assert not np.array_equal(model.layers[0].kernel, two_layers().layers[0].kernel)


# --- what one worker alone meets ---


class Careful(Own):
    """Leaves out a step if a gradient is not finite."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        gradients, variables = self.gradients(*batch), self.trainable_variables
        if tf.math.is_finite(tf.linalg.global_norm(gradients)):
            self.optimizer.apply(gradients, variables)
        return {"steps": self.optimizer.iterations}


@scenario(
    TF_2,
    cases={f"by a {how}, every {every}": (how == "scaler", every) for how in ("scaler", "norm") for every in (1, 4)},
)
def a_step_that_one_worker_leaves_out_moves_by_the_others(scales: bool, every: int) -> None:
    optimizer = keras.optimizers.Adam(0.01, weight_decay=0.5)
    if scales:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0 ** (16 - hvd.rank()))
    inner = two_layers()
    model = inner if scales else Careful(inner)
    model.compile(optimizer, loss=LOSS, **EAGERLY)
    inputs, labels = task(range(8))
    inputs[2 * BATCH, 0] = np.inf if hvd.rank() == 1 else 0.0
    values: list[np.ndarray] = []
    note = After(batch=lambda *_: values.append(inner.layers[0].kernel.numpy()))
    local = LocalUpdates(sparse(), every=every)
    model.fit(
        inputs,
        labels,
        batch_size=BATCH,
        shuffle=False,
        verbose=0,
        callbacks=[local, After(batch=same_after(every), epoch=same), note],
    )
    assert int(optimizer.iterations) == 8 - hvd.rank()
    # Only the worker itself, which goes on alone, has not moved.
    assert np.array_equal(values[1], values[2]) == (every == 4 and hvd.rank() == 1)


@scenario(TF_2, cases={"every step": (1,), "every fourth": (4,)})
def not_a_number_on_one_worker_comes_out_on_all_and_can_be_loaded_over(every: int) -> None:
    """As with a dense average. The residuals are finite, and go on."""
    model, local = two_layers(), LocalUpdates(sparse(), every=every)
    model.compile(ADAMW(), loss=LOSS, **EAGERLY)
    fit = partial(model.fit, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[local])
    fit(*task(range(4)))
    good = model.get_weights()
    inputs, labels = task(range(4, 8))
    inputs[-1, 0] = np.nan if hvd.rank() == 1 else 0.0
    fit(inputs, labels)
    assert not any(np.isfinite(one).all() for one in model.get_weights())
    assert all(np.isfinite(one).all() for one in local.compression.state_dict()["residuals"].values())
    model.set_weights(good)
    model.compile(ADAMW(), loss=LOSS, **EAGERLY)
    fit(*task(range(8, 12)))
    assert_identical(model.trainable_variables)
