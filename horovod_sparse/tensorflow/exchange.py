"""Horovod's collectives as graph operations: named, within one process set."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from horovod_sparse.tensorflow.memory import make_variable

Tensor = Any


def wire_dtype(dtype: Any) -> Any:
    """Of a dense allreduce: Horovod reduces no bfloat16, and small tensors can afford float32."""
    return tf.float32 if dtype == tf.bfloat16 else dtype


class Collectives:
    """The collectives of one reducer.

    Args:
        process_set: the workers that exchange.
    """

    number: int
    """Of the reducer, the same on all ranks and no other's; known when the ranks have agreed for the first time."""

    def __init__(self, process_set: Any) -> None:
        self._process_set = process_set
        self._zero = make_variable(np.zeros(1, np.float32), "zero", None)

    def exchanged_in_every_step(self, tensor: Tensor) -> Tensor:
        """The tensor, as something that TensorFlow does not know before.

        It takes Horovod's operations for functions of their inputs. One with a constant gradient would run once, when the
        graph is optimised, and never again, and ranks with other gradients would wait for it.
        """
        return tensor + tf.cast(self._zero[0], tensor.dtype)

    def allgather(self, message: Tensor, name: str) -> Tensor:
        """All ranks' messages, one after the other in rank order."""
        return self._allgather(message, f"{self.number}.{name}")

    def _allgather(self, message: Tensor, name: str) -> Tensor:
        name = self._full(name)
        return mpi_ops.allgather(message, name=name, ignore_name_scope=True, process_set=self._process_set)

    def _full(self, name: str) -> str:
        # Without slashes: Horovod would cut it there.
        return f"horovod_sparse.{self._process_set.process_set_id}.{name}"

    def total(self, message: Tensor, name: str) -> Tensor:
        """The sum of all ranks' messages."""
        return self._allreduce(message, name, mpi_ops.Sum)

    def dense(self, tensor: Tensor, name: str, op: Any, predivide: float) -> Tensor:
        """Horovod's dense allreduce; `predivide` splits the averaging as `gradient_predivide_factor` does."""
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

    def gather_json(self, value: object, name: str) -> list[Any]:
        """Every rank's `value`, in rank order; blocks, also while a function is traced. Plain JSON, nothing is unpickled.

        The name is the same for all reducers of the process set: ranks that are not at the same one meet, and can compare.
        """
        line = np.frombuffer(json.dumps(value).encode("ascii") + b"\n", np.uint8)
        with tf.init_scope(), tf.device("CPU:0"):
            gathered = self._allgather(tf.constant(line), name)
        return [json.loads(part) for part in gathered.numpy().tobytes().splitlines()]
