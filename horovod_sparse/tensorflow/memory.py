"""This package's own variables."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

Variable = Any


def make_variable(value: Callable[[], Any], name: str) -> Variable:
    """Make a variable of what `value` returns, outside of any function that is being traced."""
    # This uses another thread, because `tf.function` watches its own thread for new variables, even in `tf.init_scope`.
    # It would trace twice, and refuse a variable that a later trace needs.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: tf.Variable(value(), trainable=False, name=f"horovod_sparse/{name}")).result()
