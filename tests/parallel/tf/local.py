"""Scenarios: local updates under `model.fit`. Each program is right, or refused by name."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.tensorflow import TopK
from horovod_sparse.tensorflow.keras import LocalUpdates, SIDCo

from ..scenario import TF_2, TF_4, TF_GLOO_2, scenario
from .common import assert_identical, everyone, normals, raised
from .keras3 import BATCH, LOSS, adam, assert_close, compiled, small_model
from .programs import Gan, Seam

TEACHER = normals((16, 10), step=0, rank=0, salt=7)
Batches = Iterable[int]


def task(steps: Batches, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of some steps, which can be learned: this rank's, or another's."""
    rank = hvd.rank() if rank is None else rank
    inputs = np.concatenate([normals((BATCH, 16), step=step, rank=rank, salt=8) for step in steps])
    return inputs, (inputs @ TEACHER).argmax(1)


def with_adam() -> Any:
    """A model whose optimizer has its variables before the first step."""
    return compiled(adam(), builds=True)


def sparse(**settings: Any) -> Any:
    return SIDCo(0.05, **{"granularity": 10_000, "warmup": None, **settings})


def train(model: Any, local: Any, steps: Batches = range(6), *more: Any, **arguments: Any) -> Any:
    """One epoch by default."""
    given = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(*task(steps), callbacks=[local, *more], **given)


class After(keras.callbacks.Callback):
    """Calls functions of the model where their names say."""

    def __init__(self, **calls: Callable[[Any, int], object]) -> None:
        super().__init__()
        self.calls = calls

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.get("batch", lambda *_: None)(self.model, batch)

    def on_test_begin(self, logs: Any = None) -> None:
        self.calls.get("test", lambda *_: None)(self.model, 0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.get("epoch", lambda *_: None)(self.model, epoch)


def same(model: Any, _: int = 0) -> None:
    assert_identical(model.trainable_variables)


def same_after(every: int) -> Callable[[Any, int], None]:
    return lambda model, batch: same(model) if (batch + 1) % every == 0 else None


def moved(model: Any) -> None:
    assert not np.array_equal(model.layers[-1].kernel, small_model().layers[-1].kernel)


# --- what it computes ---

SETTINGS: dict[str, tuple[dict[str, Any]]] = {
    "every step": ({},),
    "every fourth, ahead": ({"every": 4, "ahead": 0.5},),
}


@scenario(TF_2, TF_4, TF_GLOO_2, cases={**SETTINGS, "ahead": ({"ahead": 0.5},)})
def keras_local_updates_train_as_dense_adam(settings: dict[str, Any]) -> None:
    held_out = task(range(90, 110), rank=9)
    dense = compiled(hvd.DistributedOptimizer(adam()))
    dense.fit(*task(range(60)), batch_size=BATCH, shuffle=False, verbose=0)
    model, local = compiled(adam()), LocalUpdates(sparse(), **settings)
    train(model, local, range(60), After(batch=same_after(local.every)))
    assert local.compression.stats().steps == 60 // local.every
    losses = [one.evaluate(*held_out, verbose=0) for one in (small_model_as_begun(), dense, model)]
    assert losses[2] < losses[1] + 0.2 * (losses[0] - losses[1]), losses
    same(model)


def small_model_as_begun() -> Any:
    return compiled(adam())


@scenario(TF_2, TF_4, cases={"plain": (False,), "with writes": (True,)})
def keras_local_updates_of_sgd_without_compression_are_dense_averaging(writes: bool) -> None:
    """Also if the program writes to variables after every step: nothing of them is remembered."""

    def clamp(model: Any, _: int) -> None:
        for variable in model.trainable_variables if writes else ():
            variable.assign(keras.ops.clip(variable, -0.1, 0.1))

    make = partial(keras.optimizers.SGD, 0.1)
    dense, model = compiled(hvd.DistributedOptimizer(make())), compiled(make())
    dense.fit(*task(range(12)), batch_size=BATCH, shuffle=False, verbose=0, callbacks=[After(batch=clamp)])
    train(model, LocalUpdates(), range(12), After(batch=clamp))
    assert_close(model, dense)
    moved(model)
    same(model)


@scenario(TF_2)
def what_a_program_loads_between_keras_local_updates_stays() -> None:
    model, local = with_adam(), LocalUpdates(sparse())
    train(model, local)
    model.set_weights([np.full(one.shape, 0.5, np.float32) for one in model.get_weights()])
    model.optimizer.learning_rate = 0.0
    # What waits is sent, and nothing else moves.
    before = local.compression.state_dict()["residuals"]
    train(model, local, [7])
    largest = max(abs(one).max() for one in before.values())
    for value in model.get_weights():
        np.testing.assert_allclose(value, 0.5, atol=largest)
    same(model)


@scenario(TF_2)
def weight_decay_does_not_grow_in_keras_local_updates() -> None:
    """An input that is always zero gives its weights no gradient: decay alone moves them."""
    model = compiled(keras.optimizers.Adam(0.01, weight_decay=0.5))
    local, kernel = LocalUpdates(), model.layers[0].kernel
    begun = kernel.numpy()[3]
    inputs, labels = task(range(20))
    inputs[:, 3] = 0.0
    model.fit(inputs, labels, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[local])
    own, mean = local.state_dict()["lengths"]
    assert own > 1.1 * mean
    np.testing.assert_allclose(kernel.numpy()[3], begun * (1 - 0.01 * 0.5) ** 20, rtol=1e-5)


@scenario(TF_2)
def a_number_that_is_not_finite_comes_out_on_all_of_keras_local_updates() -> None:
    model = with_adam()
    inputs, labels = task(range(3))
    inputs[-1, 0] = np.nan if hvd.rank() == 1 else 0.0
    model.fit(inputs, labels, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[LocalUpdates(sparse())])
    assert np.isnan(model.layers[0].kernel.numpy()).all()


# --- what Keras does around it ---


@scenario(TF_2, cases=SETTINGS)
def validation_and_checkpoints_see_what_keras_local_updates_share(settings: dict[str, Any]) -> None:
    model, local = with_adam(), LocalUpdates(sparse(), **settings)
    held_out = task(range(90, 92), rank=9)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/{{epoch}}.keras"
        save = keras.callbacks.ModelCheckpoint(path)
        history = train(model, local, range(6), save, After(test=same, epoch=same), epochs=2, validation_data=held_out)
        for epoch in (1, 2):
            same(keras.models.load_model(path.format(epoch=epoch)))
    losses = history.history["val_loss"]
    assert losses[0] != losses[1] and len(set(map(tuple, everyone(losses)))) == 1


@scenario(TF_2, cases={"every step": (1,), "every second": (2,)})
def checkpoints_within_an_epoch_see_what_keras_local_updates_share(every: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/{{batch}}.weights.h5"
        save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)
        model = with_adam()
        train(model, LocalUpdates(sparse(), every=every), range(4), save)
        model.load_weights(path.format(batch=2))
        same(model)
        moved(model)


@scenario(TF_2)
def a_checkpoint_between_two_keras_exchanges_has_the_variables_of_its_worker() -> None:
    """As the page says. They are there at that batch, and what follows is shared as ever."""
    found: list[np.ndarray] = []

    def note(model: Any, batch: int) -> None:
        if batch == 1:
            found.extend(np.array(one) for one in model.trainable_variables)

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/{{batch}}.weights.h5"
        save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)
        model = with_adam()
        train(model, LocalUpdates(sparse(), every=4), range(8), save, After(batch=note))
        same(model)
        model.load_weights(path.format(batch=2))
    saved = [np.array(one) for one in model.trainable_variables]
    assert all(map(np.array_equal, saved, found))
    mine, *others = everyone([one.tolist() for one in saved])
    assert mine not in others


class StopError(Exception):
    """Ends a run."""


@scenario(TF_2, cases=SETTINGS)
def keras_local_updates_are_restored_bit_for_bit(settings: dict[str, Any]) -> None:
    """Beside Keras' own backup, which every worker makes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "local")

        def run(stop: int | None) -> tuple[Any, Any]:
            model, local = with_adam(), LocalUpdates(sparse(), **settings)
            if file.exists() and stop is None:
                local.load_state_dict(pickle.loads(file.read_bytes()))

            def end(model: Any, epoch: int) -> None:
                file.write_bytes(pickle.dumps(local.state_dict()))

            def stop_here(model: Any, batch: int) -> None:
                if stop is not None and file.exists() and batch == stop:
                    raise StopError

            backup = keras.callbacks.BackupAndRestore(f"{folder}/backup")
            try:
                train(model, local, range(6), backup, After(epoch=end, batch=stop_here), epochs=3)
            except StopError:
                assert stop is not None
            return model, local

        first, one = run(None)
        file.unlink()
        run(4)
        second, two = run(None)
        np.testing.assert_equal([v.numpy() for v in second.weights], [v.numpy() for v in first.weights])
        for part in ("exchanges", "lengths"):
            assert two.state_dict()[part] == one.state_dict()[part]
        before, after = ([*local.state_dict()["compression"]["residuals"].values()] for local in (one, two))
        np.testing.assert_equal(after, before)
        assert any(residual.any() for residual in before)


def unknown(batches: int) -> Any:
    """A data set that does not tell its length."""

    def generate() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from (task([step]) for step in range(batches))

    shapes = tf.TensorSpec((BATCH, 16), tf.float32), tf.TensorSpec((BATCH,), tf.int64)
    return tf.data.Dataset.from_generator(generate, output_signature=shapes)


@scenario(TF_2, cases={**SETTINGS, "ahead": ({"ahead": 0.5},)})
def a_data_set_of_unknown_length_is_right_with_keras_local_updates(settings: dict[str, Any]) -> None:
    """Keras begins a batch that never comes."""
    given: dict[str, Any] = {"epochs": 2, "validation_data": task(range(90, 92), rank=9)}
    after = After(test=same, epoch=same)
    model = with_adam()
    model.fit(unknown(6), verbose=0, callbacks=[LocalUpdates(sparse(), **settings), after], **given)
    moved(model)
    models = [compiled(keras.optimizers.SGD(0.05)) for _ in range(2)]
    models[0].fit(unknown(6), verbose=0, callbacks=[LocalUpdates(**settings), after], **given)
    train(models[1], LocalUpdates(**settings), range(6), after, **given)
    assert_close(*models)


@scenario(
    TF_2,
    cases={
        "run_eagerly": ({"run_eagerly": True}, None, {"every": 4}),
        **{
            f"steps_per_execution, {name}": ({"steps_per_execution": 4}, TopK(0.2, warmup=None), settings)
            for name, settings in {"every step": {}, "ahead": {"ahead": 0.5}, "every second": {"every": 2}}.items()
        },
    },
)
def keras_local_updates_of_models_compiled_in_other_ways(
    arguments: dict[str, Any], compression: Any, settings: dict[str, Any]
) -> None:
    models = []
    for given in (arguments, {}):
        models.append(compiled(keras.optimizers.SGD(0.05), **given))
        # Of the last epoch's batches, one is alone.
        local = LocalUpdates(copy.deepcopy(compression), **settings)
        train(models[-1], local, range(9), After(epoch=same), epochs=2)
        moved(models[-1])
    assert_close(*models)


@scenario(TF_2)
def moving_statistics_stay_those_of_their_worker_with_keras_local_updates() -> None:
    """As with dense averaging. Metrics can be averaged before callbacks read them."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(32), keras.layers.BatchNormalization(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    model.compile(adam(), loss=LOSS)
    inputs, labels = task(range(6))
    callbacks = [LocalUpdates(sparse()), hvd.callbacks.MetricAverageCallback(), After(test=same, epoch=same)]
    history = model.fit(
        inputs * (1 + 3 * hvd.rank()), labels, batch_size=BATCH, shuffle=False, verbose=0, epochs=2,
        validation_data=task(range(90, 92), rank=9), callbacks=callbacks,
    )  # fmt: skip
    assert len(set(map(tuple, everyone(history.history["val_loss"])))) == 1
    mine, other = everyone([one.numpy().tolist() for one in model.non_trainable_variables])
    assert mine != other


@scenario(TF_2, cases=SETTINGS)
def after_keras_local_updates_the_model_trains_by_its_own_step(settings: dict[str, Any]) -> None:
    model, local = with_adam(), LocalUpdates(sparse(), **settings)
    steps = model.train_step
    train(model, local)
    assert model.train_step == steps
    for _ in range(2):
        model.fit(*task(range(4)), batch_size=BATCH, shuffle=False, verbose=0)
        mine, other = everyone([one.numpy().tolist() for one in model.trainable_variables])
        assert mine != other
        hvd.broadcast_variables([*model.weights, *model.optimizer.variables], root_rank=0)
        train(model, local, range(4), After(batch=same_after(local.every), epoch=same))


class Failing(keras.Model):
    """Raises on all workers when it has moved the variables in the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()
        self.build((None, 16))

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        tf.debugging.assert_less(tf.cast(self.optimizer.iterations.value, tf.int32), 3)
        return logs


@scenario(TF_2, cases={**SETTINGS, "ahead": ({"ahead": 0.5},)})
def an_error_in_a_step_leaves_the_variables_of_the_last_keras_exchange(settings: dict[str, Any]) -> None:
    model, local = Failing(), LocalUpdates(sparse(), **settings)
    model.compile(adam(), loss=LOSS)
    step = model.train_step
    raised(tf.errors.InvalidArgumentError, partial(train, model, local, range(6), After(batch=same_after(local.every))))
    same(model)
    assert model.train_step == step
    model.optimizer.iterations.assign(0)
    train(model, local, range(2), After(epoch=same))


@scenario(TF_2)
def layers_are_frozen_and_thawed_between_keras_local_updates() -> None:
    model, local = with_adam(), LocalUpdates(sparse(), every=2, ahead=0.5)
    first = model.layers[0]
    for trains in (False, True, False, True):
        first.trainable = trains
        model.compile(adam(), loss=LOSS)
        before, waited = first.kernel.numpy(), local.compression.state_dict()["residuals"].get(first.kernel.path)
        train(model, local)
        assert np.array_equal(first.kernel, before) != trains
        if not trains and waited is not None:
            np.testing.assert_array_equal(local.compression.state_dict()["residuals"][first.kernel.path], waited)
        same(model)


class Late(keras.Model):
    """Makes its layers' variables when it is called."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(4)
        self.inner = [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)]

    def call(self, inputs: Any) -> Any:
        return self.inner[1](self.inner[0](inputs))


def sequential_without_input() -> Any:
    keras.utils.set_random_seed(4)
    return keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])


@scenario(TF_2, cases={"subclass": (Late,), "sequential": (sequential_without_input,)})
def a_model_is_built_late_with_keras_local_updates(make: Callable[[], Any]) -> None:
    model = make()
    model.compile(adam(), loss=LOSS)
    message = raised(ValueError, partial(train, model, LocalUpdates(sparse()), range(1)))
    assert "must be built before fit" in message and "0 before the first batch" in message, message
    model(task([0])[0])
    hvd.broadcast_variables(model.weights, root_rank=0)
    train(model, LocalUpdates(sparse(), ahead=0.5), range(6), After(batch=same))
    assert len(model.trainable_variables) == 4


class Freezing(Late):
    """Freezes a layer in its first batch."""

    def train_step(self, data: Any) -> Any:
        self.inner[0].trainable = False
        return super().train_step(data)


@scenario(TF_2)
def variables_that_a_batch_takes_away_are_refused_with_keras_local_updates() -> None:
    model = Freezing()
    model.compile(adam(), loss=LOSS)
    model(task([0])[0])
    message = raised(ValueError, partial(train, model, LocalUpdates(sparse()), range(1)))
    assert "it had 4 before the first batch, and now has 2" in message, message


@scenario(TF_2)
def loss_scales_differ_with_keras_local_updates() -> None:
    """And a worker leaves a step out."""
    scaler = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, weight_decay=0.5), initial_scale=2.0 ** (16 - hvd.rank())
    )
    model, local = compiled(scaler), LocalUpdates(sparse())
    inputs, labels = task(range(6))
    inputs[3 * BATCH, 0] = np.inf if hvd.rank() == 1 else 0.0
    model.fit(inputs, labels, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[local, After(batch=same)])
    assert int(scaler.iterations) == 6 - hvd.rank()
    moved(model)


@scenario(TF_2)
def two_networks_train_each_other_with_keras_local_updates() -> None:
    class Plain(Seam):
        def optimizer(self, optimizer: Any, **arguments: Any) -> Any:
            return optimizer

    gan: Any = Gan(Plain(lambda: hvd.Compression.none), adam)
    noise = np.concatenate([normals((BATCH, 8), step=step, rank=hvd.rank(), salt=3) for step in range(6)])
    run = partial(gan.fit, task(range(6))[0], noise, batch_size=BATCH, verbose=0)
    message = raised(ValueError, lambda: run(callbacks=[LocalUpdates(sparse())]))
    assert "grow must be given" in message and "got None" in message and "grow=True" in message, message
    local = LocalUpdates(sparse(), grow=True)
    run(callbacks=[local, After(batch=same)])
    assert local.state_dict()["lengths"][0] > 0.0


# --- refused ---


@scenario(TF_2)
def what_does_not_go_with_keras_local_updates_is_refused_by_name() -> None:
    averaged = compiled(keras.optimizers.Adam(0.01, use_ema=True))
    message = raised(ValueError, partial(train, averaged, LocalUpdates()))
    assert "use_ema of optimizer 'adam" in message and "must be False" in message, message
    message = raised(ValueError, partial(train, compiled(adam(), jit_compile=True), LocalUpdates()))
    assert "jit_compile must be False in compile() of model 'sequential" in message, message
    distributed = compiled(hvd.DistributedOptimizer(adam()))
    message = raised(ValueError, partial(train, distributed, LocalUpdates()))
    assert "leave hvd.DistributedOptimizer out" in message, message
    for given, name in (({"momentum": 0.9}, "momentum"), ({"lr_in_residual": True}, "lr_in_residual")):
        message = raised(ValueError, lambda given=given: LocalUpdates(TopK(0.1, **given)))
        assert f"compression must have {name}=" in message, message
    for arguments, error in (({"every": 0}, ValueError), ({"every": 1.5}, TypeError), ({"ahead": 2}, ValueError)):
        assert next(iter(arguments)) in raised(error, lambda arguments=arguments: LocalUpdates(**arguments))
    assert "it has no ['exchanges'" in raised(ValueError, lambda: LocalUpdates().load_state_dict({}))
    local = LocalUpdates(every=4)
    message = raised(
        RuntimeError, partial(train, with_adam(), local, range(4), After(batch=lambda *_: local.state_dict()))
    )
    assert "state must be saved" in message and "on_epoch_end" in message, message


@scenario(TF_2)
def keras_local_updates_that_differ_are_refused_on_all() -> None:
    for local in (LocalUpdates(), LocalUpdates(every=4)):
        model = compiled(adam(), seed=hvd.rank())
        message = raised(RuntimeError, partial(train, model, local))
        assert message.count("variables with checksum") == 2 and "hvd.broadcast_variables(" in message, message
        hvd.broadcast_variables(model.weights, root_rank=0)
        train(model, local, range(4), After(epoch=same))
    message = raised(ValueError, partial(train, with_adam(), LocalUpdates(ahead=0.1 * hvd.rank())))
    assert "ahead=0.1" in message and "ahead=0.0" in message, message
    message = raised(ValueError, partial(train, with_adam(), LocalUpdates(grow=bool(hvd.rank()))))
    assert "grow=True" in message and "grow=False" in message, message


def _uneven(known: bool, model: Any, local: Any, epochs: int) -> None:
    batches = 5 + hvd.rank()
    if known:
        train(model, local, range(batches), epochs=epochs)
    else:
        model.fit(unknown(batches), epochs=epochs, verbose=0, callbacks=[local])


@scenario(
    TF_2,
    cases={"known, 1": (adam, True, 1), "unknown, 2": (adam, False, 2), "SGD": (keras.optimizers.SGD, True, 1)},
)
def uneven_numbers_of_batches_are_refused_with_keras_local_updates(
    make_optimizer: Callable[[], Any], known: bool, epochs: int
) -> None:
    for every in (1, 4):
        model = compiled(make_optimizer(), builds=True)
        local = LocalUpdates(sparse(), every=every)
        message = raised(RuntimeError, partial(_uneven, known, model, local, epochs))
        assert "at the end of epoch 0, 5 batches" in message and "give steps_per_epoch" in message, message
        same(model)
        moved(model)


@scenario(TF_2)
def a_worker_that_stops_early_or_begins_late_is_named_with_keras_local_updates() -> None:
    def stop(model: Any, epoch: int) -> None:
        model.stop_training = hvd.rank() == 1

    message = raised(RuntimeError, partial(train, with_adam(), LocalUpdates(), range(3), After(epoch=stop), epochs=2))
    assert "at the end of fit" in message and "in batch 0 of epoch 1" in message, message
    message = raised(RuntimeError, partial(train, with_adam(), LocalUpdates(), epochs=3, initial_epoch=hvd.rank()))
    assert "in batch 0 of epoch 0" in message and "in batch 0 of epoch 1" in message, message


@scenario(TF_2)
def a_worker_that_catches_an_exception_is_named_with_keras_local_updates() -> None:
    model, local = with_adam(), LocalUpdates(sparse(), ahead=0.5)

    def fail(model: Any, batch: int) -> None:
        if hvd.rank() == 1 and batch == 2:
            raise StopError

    def run() -> None:
        try:
            train(model, local, range(6), After(batch=fail))
        except StopError:
            train(model, local, range(6))

    message = raised(RuntimeError, run)
    assert "in batch 3 of epoch 0" in message and "at the beginning of fit" in message, message
    train(model, local)
    same(model)


@scenario(TF_2)
def a_training_without_keras_local_updates_exchanges_nothing() -> None:
    """Also if an exception has ended the one before, which had them: one worker trains alone, and waits for nobody."""
    model, local = with_adam(), LocalUpdates(sparse())

    def fail(model: Any, batch: int) -> None:
        if batch == 2:
            raise StopError

    raised(StopError, partial(train, model, local, range(8), After(batch=fail)))
    same(model)
    before = model.layers[-1].kernel.numpy()
    if hvd.rank() == 0:
        model.fit(*task(range(3)), batch_size=BATCH, verbose=0)
        assert not np.array_equal(model.layers[-1].kernel, before)
    assert local.state_dict()["exchanges"] == 3
    hvd.broadcast_variables(model.weights, root_rank=0)
    train(model, local)
    same(model)


@scenario(TF_2)
def a_training_that_ended_between_two_exchanges_is_named_by_keras_local_updates() -> None:
    """And the model, which still has the step of that training, gets another one."""
    model, local = with_adam(), LocalUpdates(sparse(), every=4)

    def fail(model: Any, batch: int) -> None:
        if batch == 5:
            raise StopError

    raised(StopError, partial(train, model, local, range(8), After(batch=fail)))
    message = raised(RuntimeError, partial(train, model, local, range(8)))
    assert message.count("variables with checksum") == 2 and "1 exchanges made" in message, message
    hvd.broadcast_variables(model.weights, root_rank=0)
    train(model, local, range(8), After(batch=same_after(4)))
    same(model)
