"""Scenarios: a `StatsLog` of each rank, as a callback of Keras and after the steps of a tape."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import horovod_sparse.tensorflow as adapter
import horovod_sparse.tensorflow.keras as adapter_keras
from horovod_sparse.tools.report.log import read

from ..scenario import TF_2, TF_4, scenario
from .common import everyone, normals, reduce
from .keras3 import compiled, fit

STEPS = 6


def _with_fit(path: Path, **arguments: Any) -> Any:
    compression = adapter_keras.SIDCo(0.05)
    model = compiled(
        adapter_keras.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=compression), **arguments
    )
    log = adapter_keras.StatsLog(compression, path, every=2)
    fit(model, range(STEPS), callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=log)])
    return compression


def _with_a_tape(path: Path) -> Any:
    compression = adapter.SIDCo(0.05)
    log = adapter.StatsLog(compression, path, every=2)
    variables = {"weight": tf.Variable(tf.zeros((40, 50))), "bias": tf.Variable(tf.zeros(9))}
    for step in range(STEPS):
        gradients = {name: normals(one.shape, step=step, rank=hvd.rank()) for name, one in variables.items()}
        reduce(compression, variables, gradients)
        log()
    return compression


@scenario(
    TF_2,
    TF_4,
    cases={
        "fit": (_with_fit,),
        "tape": (_with_a_tape,),
    },
)
def a_log_has_every_second_step(run: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"stats-{hvd.rank()}.jsonl"
        source = run(path)
        log = read(path)
    assert log.compressors == [repr(source)]
    assert source.stats().steps == source.steps == STEPS
    assert log.column("step") == [2, 4, 6]
    total = source.stats().last.total
    assert log.lines[-1]["count"] == total.count > 0.0
    assert log.lines[-1]["bytes_sent"] == total.bytes_sent > 0.0
    assert log.lines[-1]["residual_norm"] == total.residual_norm
    assert len(set(everyone(total.residual_norm))) == hvd.size()
    assert all(0.0 < value < 60.0 for value in log.column("seconds")[1:])
