"""This package's own variables, and their memory, on which NumPy works in place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

Tensor = Any
Variable = Any

_one_at_a_time = threading.Lock()
_seen: list[NDArray[Any]] = []


def make_variable(value: Any, name: str, device: str | None) -> Variable:
    """Make a variable outside of any function that is being traced. If `device` is None, TensorFlow chooses the device."""

    def make() -> Variable:
        with tf.device(device):
            return tf.Variable(value, trainable=False, name=f"horovod_sparse/{name}")

    return unwatched(make)


def unwatched(make: Callable[[], Variable]) -> Variable:
    """Call `make` outside of any function that is being traced, and return the variable that it makes."""
    # This uses another thread, because `tf.function` watches its own thread for new variables, even in `tf.init_scope`.
    # It would trace twice, and refuse a variable that a later trace needs.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def memory_of(variable: Variable) -> NDArray[Any]:
    """Return the memory of a variable on the CPU, not a copy. It is valid until something is assigned to the variable."""
    with _one_at_a_time, tf.init_scope(), tf.device("CPU:0"):
        _look(variable.read_value())
        return _seen.pop()


def check_memory(variable: Variable) -> None:
    """Raise RuntimeError if a value written to the memory of a variable of zeros does not appear in the variable."""
    memory = memory_of(variable)
    memory[0] = 1.0
    with tf.init_scope():
        seen = variable.numpy()[0]
    memory[0] = 0.0
    if seen != 1.0:
        raise RuntimeError(
            f"tf.numpy_function must get the memory of a variable, but TensorFlow {tf.__version__} made a copy; use a "
            "release that horovod_sparse was tested with (2.21)"
        )


# This runs in a graph, because functions that are called eagerly get copies.
@tf.function(reduce_retracing=True, autograph=False)
def _look(tensor: Tensor) -> None:
    tf.numpy_function(_seen.append, [tensor], [])
