"""Scenarios: the momentum of Keras' SGD moves before the selection, and training is the same."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as stock
import keras
import numpy as np

import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.tensorflow import NoOp, SIDCo

from ..scenario import TF_2, TF_GLOO_2, scenario
from .keras3 import assert_close, assert_in_step, compiled, data, fit

SETTINGS: dict[str, tuple[Any, ...]] = {
    "nesterov and decay": ({"nesterov": True, "weight_decay": 0.01},),
    "heavy ball": ({},),
}


def _sgd(**settings: Any) -> Any:
    # The velocity of Keras holds the rates of all steps, so a rate that falls fast tells units apart.
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.8)
    return keras.optimizers.SGD(rate, **{"momentum": 0.9, **settings})


@scenario(TF_2, TF_GLOO_2, cases=SETTINGS)
def everything_sent_is_the_stock_optimizer(settings: dict[str, Any]) -> None:
    dense, sparse = (
        compiled(hvd.DistributedOptimizer(_sgd(**settings), compression=compression))
        for compression in (hvd.Compression.none, NoOp(granularity=10_000))
    )
    for model in (dense, sparse):
        fit(model, range(12))
    assert_close(sparse, dense)
    assert_in_step(sparse)
    assert not any(velocity.numpy().any() for velocity in sparse.optimizer.momentums)
    assert sparse.optimizer.momentum == 0.9


@scenario(TF_2)
def a_dense_checkpoint_goes_on() -> None:
    dense = compiled(hvd.DistributedOptimizer(_sgd(nesterov=True), compression=hvd.Compression.none))
    fit(dense, range(4))
    sgd = _sgd(nesterov=True)
    model = compiled(hvd.DistributedOptimizer(sgd, compression=NoOp(granularity=10_000)))
    sgd.build(model.trainable_variables)
    for mine, its in zip([*model.weights, *sgd.variables], [*dense.weights, *dense.optimizer.variables], strict=True):
        mine.assign(its)
    for one in (model, dense):
        fit(one, range(4, 9))
    assert_close(model, dense)


@scenario(TF_2)
def velocities_of_one_worker_act_on_all_once_they_are_broadcast() -> None:
    # Keras counts optimizers, of which ranks may have made more or fewer; Horovod broadcasts by name.
    sgd = _sgd(name="broadcast")
    model = compiled(hvd.DistributedOptimizer(sgd, compression=SIDCo(0.1)))
    sgd.build(model.trainable_variables)
    if stock.rank() == 0:
        for velocity in sgd.momentums:
            velocity.assign(np.ones(velocity.shape))
    fit(model, range(4), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert_in_step(model)


@scenario(TF_2)
def it_stays_in_the_optimizer_where_it_cannot_move() -> None:
    for settings, arguments in (({"clipnorm": 1.0}, {}), ({}, {"momentum": None}), ({}, {"residual": False})):
        compression = SIDCo(0.1, **arguments)
        model = compiled(hvd.DistributedOptimizer(_sgd(**settings), compression=compression))
        fit(model, range(2))
        assert compression.momentum_correction is None
        assert any(velocity.numpy().any() for velocity in model.optimizer.momentums)
    compression = SIDCo(0.1)
    model = keras.Sequential([keras.layers.Embedding(50, 16), keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile(hvd.DistributedOptimizer(_sgd(), compression=compression), loss="mse")
    model.fit(np.arange(8).reshape(4, 2), data([0])[0][:4, :10], batch_size=4, verbose=0)
    assert compression.momentum_correction is None
