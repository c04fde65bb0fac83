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
        prefix: of their names, the same on all ranks and no other reducer's. Without slashes: Horovod would cut it there.
        process_set: the workers that exchange.
    """

    def __init__(self, prefix: str, process_set: Any) -> None:
        self._prefix = prefix
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
        return mpi_ops.allgather(
            message, name=f"{self._prefix}.{name}", ignore_name_scope=True, process_set=self._process_set
        )

    def total(self, message: Tensor, name: str) -> Tensor:
        """The sum of all ranks' messages."""
        return self._allreduce(message, name, mpi_ops.Sum)

    def dense(self, tensor: Tensor, name: str, op: Any, predivide: float) -> Tensor:
        """Horovod's dense allreduce; `predivide` splits the averaging as `gradient_predivide_factor` does."""
        return self._allreduce(self.exchanged_in_every_step(tensor), name, op, predivide)

    def _allreduce(self, tensor: Tensor, name: str, op: Any, predivide: float = 1.0) -> Tensor:
        return mpi_ops._allreduce(
            tensor,
            name=f"{self._prefix}.{name}",
            op=op,
            prescale_factor=1.0 / predivide,
            postscale_factor=predivide,
            ignore_name_scope=True,
            process_set=self._process_set,
        )

    def gather_json(self, value: object, name: str) -> list[Any]:
        """Every rank's `value`, in rank order; blocks, also while a function is traced. Plain JSON, nothing is unpickled."""
        line = np.frombuffer(json.dumps(value).encode("ascii") + b"\n", np.uint8)
        with tf.init_scope(), tf.device("CPU:0"):
            gathered = self.allgather(tf.constant(line), name)
        return [json.loads(part) for part in gathered.numpy().tobytes().splitlines()]
