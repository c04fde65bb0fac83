"""Scenarios: uneven data. A rank whose data has ended goes on with gradients of zero; no rank waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow.keras as hvd_keras
from horovod_sparse.tensorflow import joined

from ..scenario import TF_2, TF_4, TF_GLOO_2, scenario
from .common import COMPRESSORS, MakeCompression, assert_identical, everyone, normals, raised
from .keras3 import LOSS, compiled, data, small_model

STEPS = {2: (5, 2), 4: (2, 5, 1, 3)}
"""How many batches each rank has, by the number of ranks."""
MAKERS: dict[str, Callable[[], Any]] = {
    **{name: partial(COMPRESSORS[name], min_numel=0) for name in ("TopK", "SIDCo", "MiCRO", "DGC")},
    "dense": lambda: hvd.Compression.none,
}


def mine() -> int:
    return STEPS[hvd.size()][hvd.rank()]


def step_of(compression: Any, *, graph: bool) -> tuple[Callable[[np.ndarray, tf.Tensor], None], tf.Variable]:
    """A step that trains a variable, and the variable."""
    variable = tf.Variable(normals((40, 50), step=0, rank=0, salt=7), name="weight")

    def step(x: np.ndarray, weight: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = weight * tf.reduce_mean((variable - x) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        (gradient,) = tape.gradient(loss, [variable])
        variable.assign_sub(100.0 * gradient)

    return tf.function(step) if graph else step, variable


@scenario(
    TF_2,
    TF_GLOO_2,
    cases={
        f"{name}-{how}": (make, how == "function") for name, make in MAKERS.items() for how in ("eager", "function")
    },
)
def a_rank_without_data_adds_zeros(make: Callable[[], Any], graph: bool) -> None:
    """It trains as if its gradients were zero, bit by bit, and so do the steps that follow."""
    batches = [normals((40, 50), step=number, rank=hvd.rank()) for number in range(mine())]
    found = []
    for joins in (True, False):
        step, variable = step_of(make(), graph=graph)
        seen = []
        if joins:
            for batch, weight in joined(batches):
                step(tf.constant(batch), weight)
                seen.append((batch, float(weight)))
            assert [batch.tobytes() for batch, weight in seen if weight == 1.0] == [one.tobytes() for one in batches]
            assert len(seen) == max(STEPS[hvd.size()])
            assert all(batch is batches[-1] for batch, weight in seen if weight == 0.0)
        else:
            for number in range(max(STEPS[hvd.size()])):
                has_data = number < mine()
                step(tf.constant(batches[number if has_data else 0]), tf.constant(float(has_data)))
        assert_identical([variable])
        for number in range(10, 12):
            step(tf.constant(normals((40, 50), step=number, rank=hvd.rank())), tf.constant(1.0))
        assert_identical([variable])
        found.append(variable.numpy().tobytes())
    assert found[0] == found[1]


@scenario(TF_4, cases={"TopK": (COMPRESSORS["TopK"],), "SIDCo": (COMPRESSORS["SIDCo"],)})
def fit_ends_on_all_ranks_together(make: MakeCompression) -> None:
    def batches() -> Iterator[tuple[Any, Any, Any]]:
        for (x, y), weight in joined(data([number]) for number in range(mine())):
            yield x, y, weight * tf.ones(len(x))

    compression = make()
    model = compiled(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.5), compression=compression))
    for _ in range(2):
        model.fit(batches(), verbose=0)
        assert_identical(model.trainable_variables)
    assert compression.stats().steps == 2 * max(STEPS[hvd.size()])
    assert LOSS(data([0])[1], model(data([0])[0])) < LOSS(data([0])[1], small_model()(data([0])[0]))


@scenario(TF_2)
def datasets_that_are_empty_are_refused_unless_all_are() -> None:
    assert list(joined([])) == []
    batches = [] if hvd.rank() == 1 else [1, 2]
    message = raised(ValueError, lambda: list(joined(batches)))
    assert "got none on the ranks [1]" in message
    assert set(everyone(message.partition(":")[0])) == {"rank 0", "rank 1"}
    dataset = tf.data.Dataset.range(3 + hvd.rank())
    assert [int(batch) for batch, _ in joined(dataset)] == ([0, 1, 2, 2] if hvd.rank() == 0 else [0, 1, 2, 3])


@scenario(TF_2)
def a_graph_cannot_iterate() -> None:
    function = tf.function(lambda: [batch for batch, _ in joined([1, 2])], autograph=False)
    message = raised(RuntimeError, function)
    assert "joined must be iterated eagerly" in message
