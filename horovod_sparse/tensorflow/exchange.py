"""Horovod's collectives as named graph operations within one process set."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from numpy.typing import NDArray

from horovod_sparse.tensorflow.memory import make_variable

Tensor = Any


def wire_dtype(dtype: Any) -> Any:
    """Return the dtype for a dense allreduce: Horovod does not reduce bfloat16, and small tensors can afford float32."""
    return tf.float32 if dtype == tf.bfloat16 else dtype


class Collectives:
    """The collectives of one reducer."""

    number: int
    """The reducer's number: the same on all ranks, and unique. It is known once the ranks have agreed for the first time."""

    def __init__(self, process_set: Any) -> None:
        self._process_set = process_set
        # An operation has its name only in a function. Eager ones all have the name of their kind.
        self._agree_now = tf.function(self.agree, [tf.TensorSpec([None], tf.uint8)], autograph=False)
        self._zero = make_variable(np.zeros(1, np.float32), "zero", None)

    def exchanged_in_every_step(self, tensor: Tensor) -> Tensor:
        """Return the tensor in a form whose value TensorFlow does not know in advance.

        TensorFlow assumes that Horovod's operations are functions of their inputs. An operation with a constant gradient
        would run only once, when the graph is optimised, and ranks with other gradients would wait for it.
        """
        return tensor + tf.cast(self._zero[0], tensor.dtype)

    def allgather(self, message: Tensor, name: str) -> Tensor:
        """Return all ranks' messages, concatenated in rank order."""
        return self._allgather(message, f"{self.number}.{name}")

    def _allgather(self, message: Tensor, name: str) -> Tensor:
        return mpi_ops.allgather(message, name=self._full(name), ignore_name_scope=True, process_set=self._process_set)

    def _full(self, name: str) -> str:
        # No slashes: Horovod would cut the name there.
        return f"horovod_sparse.{self._process_set.process_set_id}.{name}"

    def total(self, message: Tensor, name: str) -> Tensor:
        """Return the sum of all ranks' messages."""
        return self._allreduce(message, name, mpi_ops.Sum)

    def dense(self, tensor: Tensor, name: str, op: Any, predivide: float) -> Tensor:
        """Run Horovod's dense allreduce; `predivide` splits the averaging as `gradient_predivide_factor` does."""
        return self._allreduce(self.exchanged_in_every_step(tensor), name, op, predivide)

    def _allreduce(self, tensor: Tensor, name: str, op: Any, predivide: float = 1.0) -> Tensor:
        return mpi_ops._allreduce(
            tensor,
            name=self._full(f"{self.number}.{name}"),
            op=op,
            prescale_factor=1.0 / predivide,
            postscale_factor=predivide,
            ignore_name_scope=True,
            process_set=self._process_set,
        )

    def gather_json(self, value: object) -> list[Any]:
        """Return every rank's `value`, in rank order. This blocks, also while a function is traced.

        The messages are plain JSON; nothing is unpickled.
        """
        with tf.init_scope(), tf.device("CPU:0"):
            gathered = self._agree_now(tf.constant(line(value)))
        return parsed(gathered.numpy().tobytes())

    def agree(self, message: Tensor) -> Tensor:
        """Return every rank's message, which `line` has made. They are for `parsed`.

        All reducers of the process set use the same name, so that ranks that are at different reducers, or of which only
        some compare variables in this step, still meet and can compare.
        """
        return self._allgather(message, "agree")


def line(value: object) -> NDArray[np.uint8]:
    """Return a value that JSON can express as a message."""
    return np.frombuffer(json.dumps(value).encode("ascii") + b"\n", np.uint8)


def parsed(lines: bytes) -> list[Any]:
    """Return every rank's value, in rank order."""
    return [json.loads(one) for one in lines.splitlines()]
