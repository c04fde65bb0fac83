"""Scenarios: Keras 3 optimizers, mostly under `model.fit`."""

from __future__ import annotations

import copy
import gc
import logging
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import horovod.tensorflow as stock
import horovod.tensorflow.keras as stock_keras
import keras
import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow as ours
import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.core import step as core_step
from horovod_sparse.tensorflow import DGC, NoOp, SIDCo, TopK

from ..scenario import TF_2, TF_4, TF_GLOO_2, scenario
from .common import COMPRESSORS, MakeCompression, assert_identical, everyone, normals, raised

BATCH = 8
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
WRAPS = [module.DistributedOptimizer for module in (stock_keras, stock, ours, hvd)]


@keras.saving.register_keras_serializable("tests")
class OwnSGD(keras.optimizers.SGD):
    """An optimizer that Keras does not know."""


def small_model(seed: int = 1) -> Any:
    """About 5 000 parameters, the same on every rank."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(48), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((16,)), *layers])


def data(steps: Iterable[int], ranks: Iterable[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of some steps: this rank's, or in every step those of several ranks one after the other."""
    pairs = [(step, rank) for step in steps for rank in ([hvd.rank()] if ranks is None else ranks)]
    inputs = [normals((BATCH, 16), step=step, rank=rank, salt=1) for step, rank in pairs]
    labels = [np.random.default_rng((2, step, rank)).integers(0, 10, BATCH) for step, rank in pairs]
    return np.concatenate(inputs), np.concatenate(labels)


def two_layers(seed: int = 1) -> Any:
    """About 2 600 parameters: two buckets of 10 000 bytes. Its graph is traced sooner."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((16,)), keras.layers.Dense(96, activation="relu"), keras.layers.Dense(10)])


def compiled(
    optimizer: Any,
    seed: int = 1,
    *,
    make_model: Callable[[int], Any] = small_model,
    builds: bool = False,
    **arguments: Any,
) -> Any:
    """A model that can be fitted.

    With `builds` the optimizer has its variables before. Most users let the first step make them, and then TensorFlow traces
    that step twice.
    """
    model = make_model(seed)
    if builds:
        optimizer.build(model.trainable_variables)
    model.compile(optimizer, loss=LOSS, **arguments)
    return model


def fit(model: Any, steps: Iterable[int], ranks: Sequence[int] | None = None, **arguments: Any) -> Any:
    """One epoch; with `ranks`, on the union of their batches."""
    inputs, labels = data(steps, ranks)
    size = BATCH * (len(ranks) if ranks is not None else 1)
    return model.fit(inputs, labels, batch_size=size, shuffle=False, verbose=0, **arguments)


def assert_close(model: Any, other: Any, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Two models have the same weights, to float32 tolerance."""
    for mine, theirs in zip(model.weights, other.weights, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=rtol, atol=atol, err_msg=mine.path)


def assert_in_step(model: Any) -> None:
    """Weights and optimizer variables are the same on every rank, to the last bit, and not those of the start."""
    assert_identical([*model.weights, *model.optimizer.variables])
    assert not np.array_equal(model.weights[0].numpy(), small_model().weights[0].numpy())


# --- replicas stay in step ---


# One of each exchange; `tensorflow_gives_what_numpy_gives` has all compressors.
EXCHANGES = ("DGC", "TopK-union", "RandomK", "MiCRO")


@scenario(TF_2, TF_4, TF_GLOO_2, cases={name: (COMPRESSORS[name], wrap) for name, wrap in zip(EXCHANGES, cycle(WRAPS))})
def keras_replicas_stay_identical(make: MakeCompression, wrap: Callable[..., Any]) -> None:
    """With every wrapper, also without a compressor."""
    compression = make(granularity=10_000)
    momentum = 0.0 if compression.momentum_correction is not None else 0.9
    model = compiled(wrap(keras.optimizers.SGD(0.05, momentum), compression=compression))
    fit(model, range(20))
    assert compression.stats().steps == 20
    assert_in_step(model)
    dense = compiled(wrap(keras.optimizers.Adam(0.01)), builds=True)
    fit(dense, range(2))
    assert_in_step(dense)


@scenario(
    TF_2,
    cases={
        "run_eagerly": ({"run_eagerly": True},),
        "steps_per_execution": ({"steps_per_execution": 4},),
    },
)
def ways_to_compile(arguments: dict[str, Any]) -> None:
    models = []
    for given in (arguments, {}):
        optimizer = hvd.DistributedOptimizer(_sgd(), compression=TopK(0.01, warmup=None))
        models.append(compiled(optimizer, **given))
        fit(models[-1], range(8))
    assert_in_step(models[0])
    assert_close(*models)


@scenario(TF_2)
def a_training_loop_of_ones_own() -> None:
    model = small_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=TopK(0.01, warmup=2.0))

    @tf.function
    def step(inputs: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = LOSS(labels, model(inputs))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    optimizer.build(model.trainable_variables)
    for number in range(6):
        step(*(tf.constant(array) for array in data([number])))
    # And without saying of what variables.
    optimizer.apply([tf.ones(v.shape) * hvd.rank() for v in model.trainable_variables])
    assert_identical([*model.weights, *optimizer.variables])


# --- what is reduced ---


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def _sgd() -> Any:
    return keras.optimizers.SGD(0.05)


def _clipped() -> Any:
    return keras.optimizers.SGD(0.5, clipnorm=0.05)


def _groups(model: Any) -> list[list[Any]]:
    """Of Keras variables. The last layer is in no group."""
    first, second, _ = model.layers
    return [[first.kernel, second.bias], [second.kernel, first.bias]]


def _none() -> Any:
    return hvd.Compression.none


# Adam divides by the size of the gradient, which may be next to nothing.
CLOSE = {adam: (1e-4, 1e-4), _sgd: (1e-5, 1e-6), _clipped: (1e-5, 1e-6)}
"""Tolerances, relative and absolute."""


@scenario(
    TF_2,
    cases={
        "none": (_none, adam, {}),
        "NoOp": (NoOp, adam, {}),
        "fp16": (lambda: hvd.Compression.fp16, adam, {}),
        "NoOp-predivide": (NoOp, adam, {"gradient_predivide_factor": 2.0}),
        "sum of groups": (_none, _sgd, {"op": ours.Sum, "groups": _groups}),
        "NoOp-sum": (NoOp, _sgd, {"op": ours.Sum}),
        "NoOp-groups": (lambda: NoOp(), adam, {"groups": 2}),
        "NoOp-groups of variables": (lambda: NoOp(), _sgd, {"groups": _groups}),
        "NoOp-clipped afterwards": (NoOp, _clipped, {}),
    },
)
def dense_is_training_on_all_data(make: MakeCompression, optimizer: Callable[[], Any], given: dict[str, Any]) -> None:
    """Training on all ranks is training on the union of their batches."""
    model, compression = small_model(), make()
    arguments = {name: value(model) if callable(value) else value for name, value in given.items()}
    model.compile(stock.DistributedOptimizer(optimizer(), compression=compression, **arguments), loss=LOSS)
    fit(model, range(10))
    alone = compiled(optimizer(), builds=True)
    if "op" in given:
        alone.optimizer.learning_rate = 0.05 * hvd.size()
    fit(alone, range(10), range(hvd.size()))
    assert_in_step(model)
    rtol, atol = (1e-1, 1e-1) if compression is hvd.Compression.fp16 else CLOSE[optimizer]
    assert_close(model, alone, rtol=rtol, atol=atol)
    if given.get("groups") is _groups and compression is not hvd.Compression.none:
        # The biases are below the size that is compressed; the kernels are one bucket each.
        assert len(compression.stats().last.buckets) == 3


@scenario(
    TF_2,
    cases={
        f"{name}-{sparse_as_dense}": (make, sparse_as_dense)
        for name, make in {"none": lambda: hvd.Compression.none, "NoOp": NoOp}.items()
        for sparse_as_dense in (False, True)
    },
)
def embeddings(make: MakeCompression, sparse_as_dense: bool) -> None:
    def build(optimizer: Any) -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(50, 40), keras.layers.Flatten(), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model.compile(optimizer, loss=LOSS)
        return model

    def batch(rank: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(rank)
        return generator.integers(0, 50, (BATCH, 3)), generator.integers(0, 10, BATCH)

    sgd = keras.optimizers.SGD(0.5)
    model = build(hvd.DistributedOptimizer(sgd, compression=make(), sparse_as_dense=sparse_as_dense))
    alone = build(keras.optimizers.SGD(0.5))
    together = [np.concatenate(arrays) for arrays in zip(*(batch(rank) for rank in range(hvd.size())), strict=True)]
    for _ in range(3):
        model.train_on_batch(*batch(hvd.rank()))
        alone.train_on_batch(*together)
    assert_identical(model.weights)
    assert_close(model, alone)


@scenario(TF_2, cases={"slices": (False,), "dense": (True,)})
def rows_of_an_embedding_that_come_again_are_added_up_first(sparse_as_dense: bool) -> None:
    """Adam takes the square of the mean gradient, also of rows that several ranks have, or one rank twice."""
    parts = [
        tf.IndexedSlices(normals((3, 4), step=0, rank=rank), [1, 1 + rank, 2], [5, 4]) for rank in range(hvd.size())
    ]
    variables = [keras.Variable(np.ones((5, 4), np.float32), name="table") for _ in range(2)]
    plain = keras.optimizers.Adam(0.1)
    ours = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), compression=NoOp(), sparse_as_dense=sparse_as_dense)
    for _ in range(3):
        plain.apply([sum(tf.convert_to_tensor(one) for one in parts) / hvd.size()], variables[:1])
        ours.apply([parts[hvd.rank()]], variables[1:])
    np.testing.assert_allclose(variables[1].numpy(), variables[0].numpy(), rtol=1e-5, atol=1e-6)
    assert_identical(variables[1:])


@scenario(TF_2, cases={"scaled": (True,), "as_it_is": (False,)})
def local_variables_keep_their_own_gradients(scale: bool) -> None:
    model = small_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=NoOp(), scale_local_gradients=scale)
    local, shared = model.layers[0].kernel, model.layers[1].kernel
    optimizer.register_local_var(local)
    before = [local.numpy(), shared.numpy()]
    inputs, labels = data([0])
    with tf.GradientTape() as tape:
        loss = LOSS(labels, model(inputs))
    mine = tape.gradient(loss, [local.value, shared.value])
    model.compile(optimizer, loss=LOSS)
    fit(model, [0])
    reduced = [mine[0].numpy() / (hvd.size() if scale else 1), np.mean(everyone(mine[1].numpy()), axis=0)]
    for variable, old, gradient in zip((local, shared), before, reduced, strict=True):
        np.testing.assert_allclose(variable.numpy(), old - 0.1 * gradient, rtol=1e-5, atol=1e-6)
    assert_identical([shared])


# --- several passes per step ---


@scenario(
    TF_2,
    cases={
        "none-average-graph": (lambda: hvd.Compression.none, True, False),
        "NoOp-average-graph": (NoOp, True, False),
        "NoOp-sum-graph": (NoOp, False, False),
        "NoOp-sum-eager": (NoOp, False, True),
    },
)
def several_passes_are_one_step(make: MakeCompression, average: bool, eager: bool) -> None:
    compression = make()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9),
        compression=compression,
        backward_passes_per_step=3,
        average_aggregated_gradients=average,
    )
    model = compiled(optimizer, run_eagerly=eager)
    # The last pass is not enough for a step.
    fit(model, range(7))
    # The mean over three batches of each rank, or three times that.
    alone = compiled(keras.optimizers.SGD(0.05 if average else 0.15, momentum=0.9), builds=True)
    for first in (0, 3):
        inputs, labels = data(range(first, first + 3), range(hvd.size()))
        alone.train_on_batch(inputs, labels)
    assert_in_step(model)
    assert_close(model, alone, rtol=1e-4, atol=1e-5)
    assert int(optimizer.iterations) == 7
    assert len(optimizer.variables) == len(alone.optimizer.variables)
    if isinstance(compression, NoOp):
        assert compression.stats().steps == 2


@scenario(TF_2, cases={"none": (lambda: hvd.Compression.none,), "TopK": (lambda: TopK(0.1),)})
def an_optimizer_that_is_not_built_adds_up_passes_in_a_function(make: MakeCompression) -> None:
    model = small_model()
    optimizer = hvd.DistributedOptimizer(adam(), compression=make(), backward_passes_per_step=2)

    @tf.function
    def step(inputs: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = LOSS(labels, model(inputs))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    before = model.get_weights()
    for number in range(4):
        step(*data([number]))
    assert_identical(model.weights)
    assert not np.array_equal(before[0], model.get_weights()[0])


@scenario(TF_2, cases={"none": (lambda: hvd.Compression.none,), "TopK": (lambda: TopK(1.0, min_numel=0, warmup=None),)})
def gradients_may_be_arrays(make: MakeCompression) -> None:
    """Keras takes arrays for gradients, also of another type than the variable, and slices of arrays with a tuple for shape."""
    expected = -np.mean([normals((30, 2), step=0, rank=rank) for rank in range(hvd.size())], axis=0)
    mine = normals((30, 2), step=0, rank=hvd.rank())
    variables = [keras.Variable(np.zeros((30, 2), np.float32)) for _ in range(3)]
    slices = tf.IndexedSlices(mine.astype(np.float32), np.arange(30), (30, 2))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=make())
    optimizer.apply([mine.astype(np.float32), mine.astype(np.float64), slices], variables)
    for variable in variables:
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5, atol=1e-6)


@scenario(
    TF_2,
    cases={
        "passes": ("backward_passes_per_step", {}, {"passes": 2}),
        "learning rate": ("learning_rate", {"lr_in_residual": True}, {"rate": 0.2}),
    },
)
def optimizers_that_differ_raise(named: str, settings: dict[str, Any], other: dict[str, Any]) -> None:
    mine = {"passes": 1, "rate": 0.1} | (other if hvd.rank() else {})
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(mine["rate"]),
        compression=TopK(0.05, warmup=None, **settings),
        backward_passes_per_step=mine["passes"],
    )
    message = raised(ValueError, lambda: fit(compiled(optimizer), range(2)))
    assert f"'{named}': (" in message, message


@scenario(
    TF_2,
    cases={
        "model": (lambda: TopK(0.05, granularity="model", warmup=None),),
        "momentum": (lambda: TopK(0.05, granularity="model", momentum=0.9, warmup=None),),
        "layer": (lambda: SIDCo(0.05, granularity="layer", warmup=None),),
    },
)
def a_layer_is_frozen_and_the_model_compiled_again(make: MakeCompression) -> None:
    """Keras then gives the optimizer fewer variables. The others go on."""
    compression = make()
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=compression))
    fit(model, range(4))
    frozen, start = model.layers[0], model.layers[0].kernel.numpy()
    kept = compression.state_dict()
    frozen.trainable = False
    model.compile(model.optimizer, loss=LOSS)
    fit(model, [4])
    np.testing.assert_array_equal(frozen.kernel.numpy(), start)
    now = compression.state_dict()
    for part in ("residuals", "velocities"):
        for name, before in kept[part].items():
            # Nothing waits of biases, which are reduced dense.
            assert before.any() != (part == "residuals" and name.endswith("bias")), name
            stays = not before.any() or name in (frozen.kernel.path, frozen.bias.path)
            assert np.array_equal(before, now[part][name]) == stays, name
    fit(model, range(5, 10))
    frozen.trainable = True
    model.compile(model.optimizer, loss=LOSS)
    fit(model, range(10, 14))
    assert (frozen.kernel.numpy() != start).any()
    assert_in_step(model)


@scenario(TF_2)
def passes_with_sparse_gradients_are_summed() -> None:
    slices = tf.IndexedSlices(tf.ones((2, 40)), tf.constant([1, 1]), tf.constant([50, 40]))
    for dense in (False, True):
        variable = keras.Variable(np.zeros((50, 40)), name="table")
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), backward_passes_per_step=2, sparse_as_dense=dense, compression=NoOp()
        )
        for _ in range(2):
            optimizer.apply([slices], [variable])
        np.testing.assert_array_equal(variable.numpy()[:3, 0], [0.0, -4.0, 0.0])


# --- the optimizer that was given ---


@scenario(TF_2)
def state_is_kept() -> None:
    model, alone = compiled(keras.optimizers.Adam(0.01)), compiled(keras.optimizers.Adam(0.01))
    for one in (model, alone):
        one.optimizer.learning_rate = 0.005
        fit(one, range(3), [0])
    optimizer = model.optimizer
    before = optimizer.variables
    assert hvd.DistributedOptimizer(optimizer, compression=NoOp()) is optimizer
    assert type(optimizer) is keras.optimizers.Adam
    assert all(a is b for a, b in zip(before, optimizer.variables, strict=True))
    model.compile(optimizer, loss=LOSS)
    for one in (model, alone):
        fit(one, range(3, 8), [0])
    assert_close(model, alone)
    assert int(optimizer.iterations) == 8
    np.testing.assert_allclose(float(optimizer.learning_rate), 0.005)


@scenario(TF_2)
def residuals_know_the_learning_rate_of_the_step() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.4, 0.2, 0.1])
    compression = TopK(0.01, lr_in_residual=True, warmup=None)
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(schedule), compression=compression))
    fit(model, [0])
    for step in range(1, 7):
        expected = 0.4 if step <= 2 else 0.2 if step <= 5 else 0.1
        with patch.object(core_step, "checked_rate", wraps=core_step.checked_rate) as rate_of:
            fit(model, [step])
        seen = [call.args[1] for call in rate_of.call_args_list]
        assert seen
        np.testing.assert_allclose(seen, expected, rtol=1e-6)
    assert_in_step(model)


@scenario(TF_2, quick=False)
def saved_models_know_nothing_of_horovod() -> None:
    with tempfile.TemporaryDirectory() as directory:
        for cls in (keras.optimizers.SGD, OwnSGD):
            path = Path(directory) / f"{cls.__name__}.keras"
            model = compiled(hvd.DistributedOptimizer(cls(0.05, momentum=0.9), compression=TopK(0.01, warmup=None)))
            fit(model, range(3))
            model.save(path)
            plain = keras.models.load_model(path)
            assert type(plain.optimizer) is cls
            mine, theirs = ([one.numpy() for one in trained.optimizer.variables] for trained in (model, plain))
            np.testing.assert_equal(theirs, mine)
            for one in (keras.optimizers.deserialize(keras.optimizers.serialize(model.optimizer)), plain.optimizer):
                assert "apply" not in vars(one)
            hvd.DistributedOptimizer(plain.optimizer, compression=TopK(0.01, warmup=None))
            fit(plain, range(3, 5))
            assert_in_step(plain)
        assert not hasattr(hvd, "load_model"), "Horovod's leaves the optimizer as it is"
        path = Path(directory) / "SGD.keras"
        code = (
            f"import keras, sys; model = keras.models.load_model({str(path)!r}); "
            "assert int(model.optimizer.iterations) == 3; assert 'horovod' not in sys.modules"
        )
        # It takes seconds, on every rank the same.
        if hvd.rank() == 0:
            subprocess.run([sys.executable, "-c", code], check=True)


# --- callbacks ---


@scenario(TF_2)
def the_callback_makes_replicas_identical() -> None:
    for local in (0, 1):
        optimizer = hvd.DistributedOptimizer(adam(), compression=SIDCo(0.01, warmup=None))
        model = compiled(optimizer, seed=hvd.rank())
        model.optimizer.learning_rate = 0.01 * (1 + hvd.rank())
        weights = [layer.kernel for layer in model.layers][:local]
        fit(model, range(5), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=weights)])
        assert_identical([*model.weights[local:], *model.optimizer.variables])
    first = everyone(model.weights[0].numpy())
    assert not np.array_equal(first[0], first[1])


@scenario(TF_2)
def variables_of_keras_are_broadcast() -> None:
    variable = keras.Variable(np.full(3, float(hvd.rank())), name="v")
    plain = tf.Variable([hvd.rank()])
    ours.broadcast_variables([variable, plain], root_rank=1)
    assert variable.numpy().tolist() == [1.0] * 3
    assert plain.numpy().tolist() == [1]
    ours.broadcast_variables([variable], root_rank=0, inplace=True)


@scenario(TF_2, TF_4)
def metrics_are_averaged() -> None:
    seen: list[dict[str, float]] = []
    own: list[float] = []
    callbacks = [
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: own.append(logs["loss"])),
        hvd.callbacks.MetricAverageCallback(),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs))),
    ]
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), metrics=["accuracy"])
    fit(model, range(4), callbacks=callbacks)
    np.testing.assert_allclose(seen[0]["loss"], np.mean(everyone(own[0])), rtol=1e-6)
    assert len(set(map(str, everyone(seen)))) == 1
    assert "accuracy" in seen[0]


# --- refused, or warned of ---


@scenario(TF_2)
def optimizers_that_are_refused() -> None:
    sgd = keras.optimizers.SGD
    wrap = stock_keras.DistributedOptimizer
    scaled = keras.optimizers.LossScaleOptimizer(sgd(0.1, momentum=0.9))
    for optimizer, compression, text in (
        (sgd(0.1, momentum=0.9), DGC(0.01, momentum=0.9), "momentum=0.9"),
        (scaled, DGC(0.01, momentum=0.9), "momentum=0.9"),
        (keras.optimizers.RMSprop(momentum=0.9), TopK(0.1, momentum=0.9), "momentum=0.9"),
    ):
        error = raised(ValueError, partial(wrap, optimizer, compression=compression))
        assert text in error, error
    used = TopK(0.01, warmup=None)
    optimizer = wrap(sgd(0.1), compression=used)
    assert "copy.deepcopy" in raised(ValueError, lambda: wrap(sgd(0.1), compression=used))
    for again in (optimizer, keras.optimizers.LossScaleOptimizer(optimizer)):
        assert "distributed already" in raised(ValueError, partial(wrap, again, compression=TopK(0.01, warmup=None)))
    wrap(sgd(0.1), compression=copy.deepcopy(used))

    assert "instance" in raised(TypeError, lambda: wrap(sgd(0.1), compression=TopK))
    for arguments, named in (
        ({"op": ours.Adasum}, "op "),
        ({"op": ours.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"groups": -1}, "groups"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
    ):
        error = raised(ValueError, partial(hvd.DistributedOptimizer, sgd(0.1), **arguments))
        assert named in error, error


@scenario(TF_2)
def the_log_says_what_an_optimizer_that_divides_costs() -> None:
    """In the first step, on the first rank, for optimizers that are seen."""

    def logged(optimizer: Any) -> list[str]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        log = logging.getLogger("horovod_sparse")
        before = log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            fit(compiled(hvd.DistributedOptimizer(optimizer, compression=TopK(0.01))), range(2))
        finally:
            log.removeHandler(handler)
            log.setLevel(before)
        return lines

    for optimizer in (adam(), keras.optimizers.LossScaleOptimizer(adam())):
        lines = logged(optimizer)
        assert len(lines) == (hvd.rank() == 0), lines
        assert all(". Adam " in line and "LocalUpdates" in line for line in lines)
    assert not any("LocalUpdates" in line for line in logged(keras.optimizers.SGD(0.1, momentum=0.9)))


@scenario(TF_2)
def a_state_goes_on_in_the_same_model_built_again() -> None:
    """Whose layers have no names, so that Keras goes on counting."""
    compressions = [SIDCo(0.05, warmup=None) for _ in range(2)]
    models = [compiled(hvd.DistributedOptimizer(_sgd(), compression=one)) for one in compressions]
    assert {weight.path for weight in models[0].weights}.isdisjoint({weight.path for weight in models[1].weights})
    fit(models[0], range(3))
    models[1].set_weights(models[0].get_weights())
    compressions[1].load_state_dict(compressions[0].state_dict())
    for model in models:
        fit(model, range(3, 6))
    np.testing.assert_equal(models[1].get_weights(), models[0].get_weights())


@scenario(TF_2, cases={"none": (lambda: hvd.Compression.none,), "TopK": (lambda: TopK(0.01, warmup=None),)})
def xla_is_refused(make: MakeCompression) -> None:
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=make()), jit_compile=True)
    error = raised(ValueError, lambda: fit(model, [0]))
    assert "model.compile(..., jit_compile=False)" in error, error


@scenario(TF_2)
def a_scripts_variables_are_not_kept() -> None:
    """As Python does with those of a function whose frame is looked into."""
    held = TopK(0.01)
    freed = weakref.ref(held)
    model = compiled(hvd.DistributedOptimizer(_sgd(), compression=TopK(0.01, warmup=None)))
    fit(model, [0])
    del held
    gc.collect()
    assert freed() is None
