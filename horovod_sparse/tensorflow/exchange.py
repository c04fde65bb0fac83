"""Horovod's collectives as named graph operations within one process set. Tested by tests/parallel/tf/tape.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from horovod_sparse.exchange.protocols import Kind

Tensor = Any
Variable = Any


class Collectives:
    """The collectives of one source. Those of exchanges have the names that `protocols.Collective` has for them."""

    number: int
    """The source's number: the same on all ranks, and unique. It is known once the ranks have agreed for the first time."""

    def __init__(self, process_set: Any) -> None:
        self._process_set = process_set
        self._zero = make_variable(lambda: np.zeros(1, np.float32), "zero")

    def result(self, kind: Kind, message: Tensor, name: str) -> Tensor:
        """Return the result of a collective (`protocols.Collective`)."""
        name = self._full(f"{self.number}.{name}")
        where = {"name": name, "ignore_name_scope": True, "process_set": self._process_set}
        if kind == "allgather":
            return mpi_ops.allgather(message, **where)
        return mpi_ops._allreduce(message, op=mpi_ops.Sum, **where)

    def result_in_every_step(self, kind: Kind, tensor: Tensor, name: str) -> Tensor:
        """Return the result of a collective of a tensor whose value TensorFlow may know in advance.

        TensorFlow assumes that Horovod's operations are functions of their inputs. An operation with a constant gradient
        would run only once, when the graph is optimised, and ranks with other gradients would wait for it.
        """
        return self.result(kind, tensor + tf.cast(self._zero[0], tensor.dtype), name)

    def _full(self, name: str) -> str:
        # No slashes: Horovod would cut the name there.
        return f"horovod_sparse.{self._process_set.process_set_id}.{name}"

    def gather_json(self, value: object, name: str) -> list[Any]:
        """Return every rank's `value`, in rank order. This blocks, also while a function is traced."""
        return gather_json(value, self._full(name), self._process_set)

    def agree(self, value: object, usual: str | None) -> list[Any]:
        """Return every rank's `value`, as `gather_json` does.

        `usual` is the collective that ranks begin a step with if they have nothing to agree on. The values go under its name,
        but in another type, so that Horovod raises on all ranks if there are such ranks. Without it all sources of the process
        set use the same name, so that ranks that are at different sources still meet and can compare.

        Raises:
            RuntimeError: some ranks have nothing to agree on.
        """
        if usual is None:
            return self.gather_json(value, "agree")
        try:
            return self.gather_json(value, f"{self.number}.{usual}")
        except tf.errors.OpError as error:
            if "Mismatched" not in str(error):
                raise
            raise RuntimeError(
                f"rank {mpi_ops.rank()}: variables must get their first gradient in the same step on every rank, but some "
                "ranks are in a step without new variables; give zeros for variables that are unused there"
            ) from error


def gather_json(value: object, name: str, process_set: Any) -> list[Any]:
    """Return every rank's `value`, in rank order. Blocks. Uses JSON, because data from other machines is not unpickled."""
    line = np.frombuffer(json.dumps(value).encode("ascii") + b"\n", np.uint8)
    with tf.init_scope(), tf.device("CPU:0"):
        gathered = _named_gather(name, process_set)(tf.constant(line))
    return [json.loads(part) for part in gathered.numpy().tobytes().splitlines()]


@cache
def _named_gather(name: str, process_set: Any) -> Any:
    # An operation has its name only in a function. Eager ones all have the name of their kind.
    def gather(line: Tensor) -> Tensor:
        return mpi_ops.allgather(line, name=name, ignore_name_scope=True, process_set=process_set)

    return tf.function(gather, [tf.TensorSpec([None], tf.uint8)], autograph=False)


def make_variable(value: Callable[[], Any], name: str) -> Variable:
    """Make a variable of what `value` returns, outside of any function that is being traced."""
    # This uses another thread, because `tf.function` watches its own thread for new variables, even in `tf.init_scope`.
    # It would trace twice, and refuse a variable that a later trace needs.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: tf.Variable(value(), trainable=False, name=f"horovod_sparse/{name}")).result()
