"""Scenarios: a `StatsLog` of each rank, as a callback of Keras and after the steps of a tape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import horovod_sparse.tensorflow as adapter
import horovod_sparse.tensorflow.keras as adapter_keras

from .. import logged
from ..logged import STEPS
from ..scenario import TF_2, TF_4, scenario
from .common import everyone, normals, reduce
from .keras3 import compiled, fit


def _with_fit(path: Path) -> Any:
    compression = adapter_keras.SIDCo(0.05, warmup=None)
    model = compiled(adapter_keras.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=compression))
    log = adapter_keras.StatsLog(compression, path, every=2)
    fit(model, range(STEPS), callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=log)])
    return compression


def _with_a_tape(path: Path) -> Any:
    compression = adapter.SIDCo(0.05, warmup=None)
    log = adapter.StatsLog(compression, path, every=2)
    variables = {"weight": tf.Variable(tf.zeros((40, 50))), "bias": tf.Variable(tf.zeros(9))}
    for step in range(STEPS):
        gradients = {name: normals(one.shape, step=step, rank=hvd.rank()) for name, one in variables.items()}
        reduce(compression, variables, gradients)
        log()
    return compression


@scenario(TF_2, TF_4, cases={"fit": (_with_fit,), "tape": (_with_a_tape,)})
def a_log_has_every_second_step(run: Any) -> None:
    logged.check(run, hvd.rank(), everyone)
