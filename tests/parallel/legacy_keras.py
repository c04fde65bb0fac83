"""Train with legacy Keras (`TF_USE_LEGACY_KERAS=1`), whose optimizers stock Horovod reduces, with our compression or without.

python -m parallel.legacy_keras
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow.keras as stock
import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow as ours
import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.tensorflow import DGC, NoOp, SIDCo, TopK

BATCH = 8
STEPS = 12


def model_of(optimizer: Any) -> Any:
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.layers.Dense(64, activation="relu"), tf.keras.layers.Dense(48), tf.keras.layers.Dense(10)]
    model = tf.keras.Sequential([tf.keras.layers.InputLayer((16,)), *layers])
    model.compile(optimizer, loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit(model: Any, ranks: list[int], callbacks: Any = ()) -> None:
    """One epoch on the batches of some ranks, those of a step one after the other."""
    generators = [np.random.default_rng((step, rank)) for step in range(STEPS) for rank in ranks]
    inputs = np.concatenate([g.standard_normal((BATCH, 16)).astype(np.float32) for g in generators])
    labels = np.concatenate([g.integers(0, 10, BATCH) for g in generators])
    model.fit(inputs, labels, batch_size=BATCH * len(ranks), shuffle=False, verbose=0, callbacks=list(callbacks))


def assert_in_step(model: Any) -> None:
    start = model_of("sgd").get_weights()
    for number, (weight, first) in enumerate(zip(model.get_weights(), start, strict=True)):
        gathered = tf.reshape(ours.allgather(tf.constant(weight[None])), (hvd.size(), *weight.shape)).numpy()
        assert np.array_equal(gathered, np.broadcast_to(gathered[0], gathered.shape)), f"weight {number} differs"
        assert not np.array_equal(weight, first)


def assert_close(model: Any, other: Any) -> None:
    for mine, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def refused(function: Callable[[], object], named: str) -> None:
    message = ""
    try:
        function()
    except ValueError as error:
        message = str(error)
    assert named in message, message


def main() -> None:
    assert not hasattr(tf.keras, "ops"), "TF_USE_LEGACY_KERAS=1 must be set"
    sgd = tf.keras.optimizers.SGD
    alone = model_of(sgd(0.05))
    fit(alone, list(range(hvd.size())))
    for wrap, compression in (
        (stock.DistributedOptimizer, NoOp()),
        (stock.DistributedOptimizer, SIDCo(0.01)),
        (hvd.DistributedOptimizer, hvd.Compression.none),
    ):
        model = model_of(wrap(sgd(0.05), compression=compression))
        fit(model, [hvd.rank()], [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        assert_in_step(model)
        if isinstance(compression, SIDCo):
            assert compression.stats().steps == STEPS
        else:
            assert_close(model, alone)

    # Stock Horovod forgets the operation when it is called this way.
    model = model_of(ours.DistributedOptimizer(sgd(0.05 / hvd.size()), compression=NoOp(), op=ours.Sum))
    fit(model, [hvd.rank()])
    assert_close(model, alone)

    compression = TopK(0.01)
    adam = tf.keras.optimizers.Adam(0.01)
    model = model_of(stock.DistributedOptimizer(adam, compression=compression, backward_passes_per_step=3))
    fit(model, [hvd.rank()], [hvd.callbacks.MetricAverageCallback()])
    assert_in_step(model)
    assert compression.stats().steps == STEPS // 3

    again = type(model.optimizer).from_config(model.optimizer.get_config())
    assert type(again).__name__ == "Adam" and again.get_config() == model.optimizer.get_config()
    twin = model_of(again)
    fit(twin, [hvd.rank()])
    assert_in_step(twin)
    for mine, theirs in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    # Each has residuals of its own.
    assert compression.stats().steps == STEPS // 3
    model = model_of(hvd.DistributedOptimizer(sgd(0.05, momentum=0.9), compression=TopK(0.05)))
    fit(model, [hvd.rank()])
    assert_in_step(model)

    for suffix in ("keras", "h5"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"model.{suffix}"
            model.save(path)
            loaded = hvd.load_model(path, compression=TopK(0.05))
        for mine, theirs in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
            np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
        fit(loaded, [hvd.rank()])
        assert_in_step(loaded)

    refused(lambda: stock.DistributedOptimizer(sgd(0.1, momentum=0.9), compression=DGC(0.01)), "momentum=0.9")
    refused(lambda: stock.DistributedOptimizer(sgd(0.1), compression=compression), "copy.deepcopy")
    print("legacy Keras works")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    hvd.init()
    main()
