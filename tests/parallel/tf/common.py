"""What scenarios for TensorFlow share: gradients given exactly, a small model, comparisons across ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_sparse.tensorflow as adapter
from tests.harness.makers import MakeCompression, makers

from ..scenario import normals as normals
from ..scenario import raised as raised
from ..scenario import selected as selected

COMPRESSORS: dict[str, MakeCompression] = {
    name: partial(make, adapter) for name, make in makers(0.01, Threshold={"threshold": 0.05}).items()
}


def variables(shapes: Mapping[str, Sequence[int]], dtype: Any = tf.float32) -> dict[str, tf.Variable]:
    """Named variables that are zero."""
    return {name: tf.Variable(tf.zeros(tuple(shape), dtype), name=name) for name, shape in shapes.items()}


def tape_gradient(loss: Callable[[], Any], sources: Any, compression: Any, **arguments: Any) -> Any:
    """The gradient of a loss, by a distributed tape."""
    with tf.GradientTape() as tape:
        value = loss()
    return hvd.DistributedGradientTape(tape, compression=compression, **arguments).gradient(value, sources)


def reduced(
    compression: Any, variables: Mapping[str, tf.Variable], gradients: Mapping[str, Any], **arguments: Any
) -> dict[str, tf.Tensor]:
    """What a distributed tape makes of exactly these gradients; a variable without one is no part of the loss."""

    def loss() -> tf.Tensor:
        terms = [
            tf.cast(tf.reduce_sum(variables[name] * tf.cast(gradient, variables[name].dtype)), tf.float64)
            for name, gradient in gradients.items()
        ]
        return tf.add_n([tf.constant(0.0, tf.float64), *terms])

    found = tape_gradient(loss, list(variables.values()), compression, **arguments)
    return {name: tf.convert_to_tensor(one) for name, one in zip(variables, found, strict=True) if one is not None}


def reduce(
    compression: Any, variables: Mapping[str, tf.Variable], gradients: Mapping[str, Any], **arguments: Any
) -> dict[str, np.ndarray]:
    """The same as arrays."""
    return {name: one.numpy() for name, one in reduced(compression, variables, gradients, **arguments).items()}


# --- across ranks ---


def everyone(value: Any, name: str = "everyone") -> list[Any]:
    """Every rank's value, in rank order."""
    gathered: list[Any] = hvd.allgather_object(value, name=name)
    return gathered


def assert_identical(arrays: Sequence[Any]) -> None:
    """Arrays, tensors or variables are the same on every rank, to the last bit, and finite."""
    sha = hashlib.sha256()
    for array in arrays:
        values = np.asarray(array)
        assert np.isfinite(values.astype(np.float64)).all()
        sha.update(values.tobytes())
    digests = everyone(sha.hexdigest())
    assert len(set(digests)) == 1, f"replicas differ: {digests}"
