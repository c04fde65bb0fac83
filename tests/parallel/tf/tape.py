"""Scenarios: gradient tapes, eager and in `tf.function`."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from mpi4py import MPI

import horovod_sparse.numpy as reference
from horovod_sparse.numpy import SparseAllreduce

from ..scenario import TF_2, TF_4, scenario
from .common import COMPRESSORS, MakeCompression, assert_identical, normals, reduce, variables

SHAPES = {"first": (40, 50), "second": (3000,), "third": (20, 5, 9), "small": (30,)}
SETTINGS = {"granularity": "bucket", "bucket_bytes": 16_000}


def oracle(compression: Any) -> SparseAllreduce:
    """The NumPy path with the same settings."""
    settings = compression.settings()
    cls = getattr(reference, settings.pop("compressor"))
    other = cls.__new__(cls)
    vars(other).update({name: value for name, value in vars(compression).items() if not name.startswith("_")})
    return SparseAllreduce(MPI.COMM_WORLD, other)


@scenario(TF_2, TF_4, cases={name: (make,) for name, make in COMPRESSORS.items()})
def tensorflow_gives_what_numpy_gives(make: MakeCompression) -> None:
    compression = make(**SETTINGS)
    expect = oracle(compression)
    weights = variables(SHAPES)
    graph = tf.function(lambda gradients: reduce_tensors(compression, weights, gradients))
    for step in range(8):
        gradients = {name: normals(shape, step=step, rank=hvd.rank()) for name, shape in SHAPES.items()}
        expected = expect(gradients)
        if step % 2:
            got = reduce(compression, weights, gradients)
        else:
            got = {n: t.numpy() for n, t in graph({n: tf.constant(g) for n, g in gradients.items()}).items()}
        for name in SHAPES:
            np.testing.assert_array_equal(got[name], expected[name], err_msg=f"step {step}, {name}")
        assert_identical(list(got.values()))
    assert graph.experimental_get_tracing_count() == 1


def reduce_tensors(
    compression: Any, weights: dict[str, tf.Variable], gradients: dict[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(weights[name] * gradient) for name, gradient in gradients.items()])
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    return dict(zip(weights, tape.gradient(loss, list(weights.values())), strict=True))
