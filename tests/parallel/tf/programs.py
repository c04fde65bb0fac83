"""Scenarios: programs as users write them. What is right with a dense average is right with ours.

With everything sent, the variables are those of dense averaging; with a small part, replicas are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.tensorflow import DistributedGradientTape, SIDCo, TopK

from ..scenario import TF_2, TF_GLOO_2, scenario
from .common import MakeCompression, assert_identical, raised
from .keras3 import BATCH, LOSS, compiled, data, fit, normals, small_model, two_layers

Arrays = list[np.ndarray]
Adam = partial(keras.optimizers.Adam, 0.01)
Momentum = partial(keras.optimizers.SGD, 0.05, momentum=0.9)
STEPS = 6


class Seam:
    """What makes a program distributed: the only lines that differ between dense and compressed."""

    def __init__(self, make: MakeCompression, *, sparse_as_dense: bool = False) -> None:
        self._make, self._of_tapes, self._sparse_as_dense = make, make(), sparse_as_dense

    def optimizer(self, optimizer: Any, **arguments: Any) -> Any:
        given = {"compression": self._make(), "sparse_as_dense": self._sparse_as_dense, **arguments}
        return hvd.DistributedOptimizer(optimizer, **given)

    def gradient(self, tape: Any, loss: Any, variables: Any) -> list[Any]:
        found: list[Any] = DistributedGradientTape(tape, compression=self._of_tapes).gradient(loss, variables)
        return found


Program = Callable[[Seam], Arrays]


def kept(model: Any, *optimizers: Any) -> Arrays:
    """What must be the same."""
    of_optimizers = [variable for one in optimizers for variable in one.variables]
    return [variable.numpy() for variable in (*model.weights, *of_optimizers)]


def is_spoiled(step: int) -> bool:
    """Whether a gradient of the second rank is not finite."""
    return step in (1, 3) and bool(hvd.rank() == 1)


# --- fit ---


def fitted(make_optimizer: Callable[[], Any], seam: Seam, *, wrapping: Any = None, **arguments: Any) -> Arrays:
    model = compiled(seam.optimizer(make_optimizer(), **(wrapping or {})), **arguments)
    fit(model, range(STEPS))
    return kept(model, model.optimizer)


def layers_are_frozen_and_thawed(seam: Seam, *, eager: bool) -> Arrays:
    model = compiled(seam.optimizer(Momentum()), run_eagerly=eager)
    for step, trained in enumerate((True, False, False, True, True)):
        if model.layers[0].trainable != trained:
            model.layers[0].trainable = trained
            model.compile(model.optimizer, loss=LOSS, run_eagerly=eager)
        fit(model, [step])
    return kept(model, model.optimizer)


def a_frozen_model_is_tuned_with_a_new_optimizer(seam: Seam) -> Arrays:
    model = small_model()
    for stage, make_optimizer in enumerate((Adam, Momentum)):
        for layer in model.layers[:2]:
            layer.trainable = stage == 1
        model.compile(seam.optimizer(make_optimizer()), loss=LOSS)
        fit(model, range(3 * stage, 3 * stage + 3))
    return kept(model, model.optimizer)


class Gan(keras.Model):
    """Two networks that train each other, each with an optimizer."""

    def __init__(self, seam: Seam, make_optimizer: Callable[[], Any], *, builds: bool = False) -> None:
        super().__init__()
        keras.utils.set_random_seed(2)
        relu, loss = partial(keras.layers.Dense, activation="relu"), keras.losses.BinaryCrossentropy(from_logits=True)
        self.generator = keras.Sequential([keras.Input((8,)), relu(48), keras.layers.Dense(16)])
        self.discriminator = keras.Sequential([keras.Input((16,)), relu(48), keras.layers.Dense(1)])
        self.first, self.second = (seam.optimizer(make_optimizer()) for _ in range(2))
        if builds:
            self.first.build(self.generator.trainable_variables)
            self.second.build(self.discriminator.trainable_variables)
        self.loss_of = lambda real, x: loss(tf.fill((BATCH, 1), real), self.discriminator(x))
        self.compile(jit_compile=False)

    def train_step(self, batch: Any) -> dict[str, Any]:
        real, noise = batch
        with tf.GradientTape() as tape:
            loss = self.loss_of(1.0, real) + self.loss_of(0.0, self.generator(noise))
        self._apply(self.second, self.discriminator, tape, loss)
        with tf.GradientTape() as tape:
            loss = self.loss_of(1.0, self.generator(noise))
        self._apply(self.first, self.generator, tape, loss)
        return {"loss": loss}

    def _apply(self, optimizer: Any, network: Any, tape: Any, loss: Any) -> None:
        variables = network.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def two_networks_train_each_other(make_optimizer: Callable[[], Any], seam: Seam, *, builds: bool = False) -> Arrays:
    gan = Gan(seam, make_optimizer, builds=builds)
    noise = np.concatenate([normals((BATCH, 8), step=step, rank=hvd.rank(), salt=3) for step in range(STEPS)])
    gan.fit(data(range(STEPS))[0], noise, batch_size=BATCH, shuffle=False, verbose=0)
    return kept(gan.generator, gan.first) + kept(gan.discriminator, gan.second)


# --- loops of one's own ---


def _in_graph(function: Callable[..., Any], graph: bool) -> Callable[..., Any]:
    traced: Callable[..., Any] = tf.function(function) if graph else function
    return traced


def loop(
    seam: Seam,
    *,
    tape_reduces: bool,
    graph: bool,
    make_optimizer: Callable[[], Any] = Momentum,
    after: Callable[[list[Any]], list[Any]] = lambda gradients: gradients,
) -> Arrays:
    """With a distributed tape, or a distributed optimizer; `after` changes the gradients before the optimizer steps."""
    model = small_model()
    optimizer = make_optimizer() if tape_reduces else seam.optimizer(make_optimizer())
    optimizer.build(model.trainable_variables)

    def step(inputs: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = LOSS(labels, model(inputs))
        variables = model.trainable_variables
        gradients = seam.gradient(tape, loss, variables) if tape_reduces else tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(after(gradients), variables, strict=True))

    run = _in_graph(step, graph)
    for number in range(STEPS):
        run(*map(tf.constant, data([number])))
    return kept(model, optimizer)


def clipped(gradients: list[Any]) -> list[Any]:
    return list(tf.clip_by_global_norm(gradients, 0.1)[0])


def noised(gradients: list[Any]) -> list[Any]:
    noise = [tf.random.stateless_normal(gradient.shape, (1, 2)) for gradient in gradients]
    return [gradient + 0.01 * one for gradient, one in zip(gradients, noise, strict=True)]


def an_optimizer_is_exchanged(seam: Seam) -> Arrays:
    model = small_model()
    for step in range(STEPS):
        if step in (0, 3):
            optimizer = Adam() if step else Momentum()
        with tf.GradientTape() as tape:
            loss = LOSS(data([step])[1], model(data([step])[0]))
        gradients = seam.gradient(tape, loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
    return kept(model, optimizer)


def steps_are_left_out_where_a_norm_is_not_finite(seam: Seam, *, graph: bool) -> Arrays:
    model, optimizer = small_model(), Adam()
    optimizer.build(model.trainable_variables)

    def apply(gradients: list[Any]) -> bool:
        optimizer.apply(gradients, model.trainable_variables)
        return True

    def step(inputs: Any, labels: Any, factor: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = factor * LOSS(labels, model(inputs))
        gradients = seam.gradient(tape, loss, model.trainable_variables)
        return tf.cond(tf.math.is_finite(tf.linalg.global_norm(gradients)), lambda: apply(gradients), lambda: False)

    run = _in_graph(step, graph)
    for number in range(STEPS):
        inputs, labels = map(tf.constant, data([number]))
        done = run(inputs, labels, tf.constant(np.nan if is_spoiled(number) else 1.0))
        assert bool(done) == (number not in (1, 3))
    return kept(model, optimizer)


def _scaled(make_optimizer: Callable[[], Any]) -> Any:
    return keras.optimizers.LossScaleOptimizer(make_optimizer(), initial_scale=2.0**7, dynamic_growth_steps=3)


def a_loss_scaler_leaves_out_steps(
    make_optimizer: Callable[[], Any], seam: Seam, *, where: str, eager: bool = False
) -> Arrays:
    """It is in the distributed optimizer, around it, or steps with what a tape has reduced."""
    if where == "tape":
        model, scaler = small_model(), _scaled(make_optimizer)
        scaler.build(model.trainable_variables)
    else:
        wraps: Any = [_scaled, lambda make: seam.optimizer(make())]
        inner, outer = wraps if where == "inside" else wraps[::-1]
        model = compiled(outer(lambda: inner(make_optimizer)), run_eagerly=eager)
        scaler = model.optimizer
    for step in range(STEPS):
        inputs, labels = data([step])
        inputs[0, 0] = np.inf if is_spoiled(step) else inputs[0, 0]
        if where == "tape":
            with tf.GradientTape() as tape:
                loss = scaler.scale_loss(LOSS(labels, model(inputs)))
            scaler.apply(seam.gradient(tape, loss, model.trainable_variables), model.trainable_variables)
        else:
            model.train_on_batch(inputs, labels)
    assert int(scaler.iterations) == STEPS - 2
    return kept(model, scaler)


def half_precision(seam: Seam) -> Arrays:
    """Keras puts a scaler around the optimizer."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return fitted(Momentum, seam)
    finally:
        keras.mixed_precision.set_global_policy("float32")


# --- variables without gradients ---


def parts_in_turns(make_optimizer: Callable[[], Any], seam: Seam, *, tape_reduces: bool, named: bool) -> Arrays:
    """Two heads of which a step trains one. The others' gradients are None, or they are not among the variables."""
    model = small_model()
    keras.utils.set_random_seed(3)
    heads = [keras.Sequential([keras.Input((10,)), keras.layers.Dense(40), keras.layers.Dense(10)]) for _ in range(2)]
    everything = [variable for one in (model, *heads) for variable in one.trainable_variables]
    optimizer = make_optimizer() if tape_reduces else seam.optimizer(make_optimizer())
    optimizer.build(everything)
    for step in range(STEPS):
        used = heads if step == 0 else [heads[step % 2]]
        inputs, labels = map(tf.constant, data([step]))
        with tf.GradientTape() as tape:
            loss = tf.add_n([LOSS(labels, head(model(inputs))) for head in used])
        trained = [variable for one in (model, *used) for variable in one.trainable_variables]
        variables = everything if named else trained
        gradients = seam.gradient(tape, loss, variables) if tape_reduces else tape.gradient(loss, variables)
        assert sum(gradient is not None for gradient in gradients) == len(trained)
        optimizer.apply(gradients, variables)
    return kept(model, optimizer) + kept(heads[0]) + kept(heads[1])


def no_gradient_at_all(seam: Seam, *, tape_reduces: bool) -> Arrays:
    model = small_model()
    optimizer = Adam() if tape_reduces else seam.optimizer(Adam())
    variables = model.trainable_variables
    for step in range(3):
        inputs, labels = map(tf.constant, data([step]))
        with tf.GradientTape() as tape:
            loss = tf.constant(0.0) if step == 1 else LOSS(labels, model(inputs))
        gradients = seam.gradient(tape, loss, variables) if tape_reduces else tape.gradient(loss, variables)
        if step == 1:
            message = raised(ValueError, partial(optimizer.apply, gradients, variables))
            assert "No gradients provided" in message, message
        else:
            optimizer.apply(gradients, variables)
    return kept(model, optimizer)


def embeddings(make_optimizer: Callable[[], Any], seam: Seam) -> Arrays:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(50, 16), keras.layers.Flatten(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    model.compile(seam.optimizer(make_optimizer()), loss=LOSS)
    for step in range(4):
        words = np.random.default_rng((step, hvd.rank())).integers(0, 50, (BATCH, 3))
        model.train_on_batch(words, data([step])[1])
    return kept(model, model.optimizer)


# --- exceptions ---


class Refuses(keras.constraints.Constraint):
    """Raises when it is told to: when the optimizer has stepped."""

    now = False

    def __call__(self, w: Any) -> Any:
        if self.now:
            raise LookupError
        return w


def an_exception_in_the_optimizer_is_caught(make_optimizer: Callable[[], Any], seam: Seam, **wrapping: Any) -> Arrays:
    model = compiled(seam.optimizer(make_optimizer(), **wrapping), run_eagerly=True)
    refuses = model.layers[1].kernel.constraint = Refuses()
    for step in range(STEPS):
        refuses.now = step in (2, 3)
        try:
            fit(model, [step])
        except LookupError:
            assert refuses.now
    return kept(model, model.optimizer)


def an_exception_in_the_forward_pass_is_caught(seam: Seam) -> Arrays:
    model, optimizer = small_model(), Momentum()
    for step in range(STEPS):
        try:
            with tf.GradientTape() as tape:
                loss = LOSS(data([step])[1], model(data([step])[0]))
                if step == 2:
                    raise LookupError
            gradients = seam.gradient(tape, loss, model.trainable_variables)
            if step == 3:
                raise LookupError
            optimizer.apply(gradients, model.trainable_variables)
        except LookupError:
            continue
    return kept(model, optimizer)


def two_optimizers() -> Any:
    """Of Keras, one for the kernels and one for the biases."""
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(Momentum(), {".*kernel": Adam()}))


def optimizers_of_keras() -> dict[str, Callable[[], Any]]:
    """Every one that Keras has, but those around others."""
    wrappers = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)
    found = [one for one in vars(keras.optimizers).values() if isinstance(one, type) and issubclass(one, wrappers[0])]
    made: dict[str, Callable[[], Any]] = {one.__name__: one for one in found if one not in wrappers}
    # The default is so small that zeros are divided by zeros where a row of the gradient has nothing else.
    return made | {"Adafactor": partial(keras.optimizers.Adafactor, epsilon_1=1e-10)}


WITH_ADAM: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.005},
    "use_ema": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 4},
    "weight_decay": {"weight_decay": 0.01},
    "loss_scale_factor": {"loss_scale_factor": 8.0},
    "gradient_accumulation": {"gradient_accumulation_steps": 3},
    "schedule": {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.8)},
}
IN_GRAPH = ("gradient_accumulation", "use_ema")
"""What these do depends on the step, by operations of a graph."""
_fitted_soon = partial(fitted, make_model=two_layers, builds=True)
STOCK: dict[str, Program] = {
    # What an optimizer computes is the same in a graph, which takes seconds to trace.
    **{f"fit {name}": partial(_fitted_soon, one, run_eagerly=True) for name, one in optimizers_of_keras().items()},
    **{
        f"fit {name}": partial(_fitted_soon, partial(keras.optimizers.Adam, **given), run_eagerly=name not in IN_GRAPH)
        for name, given in WITH_ADAM.items()
    },
}
"""Programs that differ from "fit" by their optimizer alone, which has its variables before the first step: "fit" does not."""
PROGRAMS: dict[str, Program] = {
    "fit": partial(fitted, partial(Momentum, nesterov=True)),
    **STOCK,
    "fit MultiOptimizer": partial(fitted, two_optimizers),
    "fit eagerly": partial(fitted, Adam, run_eagerly=True),
    "fit several steps": partial(fitted, Momentum, steps_per_execution=3, builds=True),
    "fit without XLA": partial(fitted, Momentum, jit_compile=False, builds=True),
    "fit several passes": partial(fitted, Adam, wrapping={"backward_passes_per_step": 2}, builds=True),
    "fit mean of several passes": partial(
        fitted, Momentum, wrapping={"backward_passes_per_step": 3, "average_aggregated_gradients": True}, builds=True
    ),
    "fit frozen and thawed": partial(layers_are_frozen_and_thawed, eager=False),
    "fit frozen and thawed, eagerly": partial(layers_are_frozen_and_thawed, eager=True),
    "fit in stages": a_frozen_model_is_tuned_with_a_new_optimizer,
    "fit half precision": half_precision,
    "GAN Adam": partial(two_networks_train_each_other, Adam, builds=True),
    "GAN momentum": partial(two_networks_train_each_other, Momentum),
    **{
        f"loop {who} {how}": partial(loop, tape_reduces=who == "tape", graph=how == "graph", make_optimizer=make)
        for who, how, make in (
            ("tape", "graph", Momentum),
            ("tape", "eager", Adam),
            ("optimizer", "graph", Adam),
            ("optimizer", "eager", Momentum),
        )
    },
    "clipped after the reduction": partial(loop, tape_reduces=True, graph=True, after=clipped),
    "noised after the reduction": partial(loop, tape_reduces=True, graph=False, after=noised),
    "exchanged optimizer": an_optimizer_is_exchanged,
    "left out, graph": partial(steps_are_left_out_where_a_norm_is_not_finite, graph=True),
    "left out, eager": partial(steps_are_left_out_where_a_norm_is_not_finite, graph=False),
    "scaler inside": partial(a_loss_scaler_leaves_out_steps, Momentum, where="inside"),
    "scaler around": partial(a_loss_scaler_leaves_out_steps, Adam, where="around"),
    "scaler around, eager": partial(a_loss_scaler_leaves_out_steps, Momentum, where="around", eager=True),
    "scaler and tape": partial(a_loss_scaler_leaves_out_steps, Adam, where="tape"),
    **{
        f"parts in turns {who} {how}": partial(
            parts_in_turns, make, tape_reduces=who == "tape", named=how == "without gradient"
        )
        for who, how, make in (
            ("tape", "without gradient", Adam),
            ("tape", "left out", Momentum),
            ("optimizer", "without gradient", Momentum),
            ("optimizer", "left out", Adam),
        )
    },
    "no gradient, tape": partial(no_gradient_at_all, tape_reduces=True),
    "no gradient, optimizer": partial(no_gradient_at_all, tape_reduces=False),
    "embeddings": partial(embeddings, Adam),
    "exception in the optimizer": partial(an_exception_in_the_optimizer_is_caught, Adam),
    "exception in the optimizer, several passes": partial(
        an_exception_in_the_optimizer_is_caught, Momentum, backward_passes_per_step=2
    ),
    "exception in the forward pass": an_exception_in_the_forward_pass_is_caught,
}


@scenario(TF_2, TF_GLOO_2, cases={name: (program,) for name, program in PROGRAMS.items()})
def a_program_that_is_right_with_a_dense_average_is_right(program: Program) -> None:
    # Stock slices hold a row as often as it came, and Keras' Adam adds up the squares of its parts.
    dense = program(Seam(lambda: hvd.Compression.none, sparse_as_dense=True))
    all_sent = program(Seam(lambda: TopK(1.0, min_numel=0, granularity=10_000, warmup=None)))
    for mine, theirs in zip(all_sent, dense, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    # An optimizer that is right with reduced gradients is so with any: tracing it again would only take time.
    if program not in STOCK.values():
        assert_identical(program(Seam(lambda: SIDCo(0.02, granularity=10_000, warmup=None))))
