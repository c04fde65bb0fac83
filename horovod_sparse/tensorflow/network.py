"""Horovod's collectives of zeros as named operations, to measure the network with. They are within one process set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.exchange.measure import Run
from horovod_sparse.exchange.network import Call
from horovod_sparse.tensorflow.exchange import Collectives

Tensor = Any


class TimedCollectives:
    """Implements `exchange.measure.Collectives`, also while a function is traced."""

    def __init__(self, collectives: Collectives, world: int) -> None:
        self._collectives = collectives
        self.world = world

    def run(self, calls: Sequence[Call], name: str) -> Run:
        def together(messages: list[Tensor]) -> list[Tensor]:
            return [
                getattr(self._collectives, call.kind)(message, f"{name}.{number}")
                for number, (call, message) in enumerate(zip(calls, messages, strict=True))
            ]

        with tf.init_scope(), tf.device("CPU:0"):
            # The result of an operation with constant inputs would be computed once.
            messages = [tf.zeros(call.length, tf.float32) for call in calls]
            function = tf.function(together, autograph=False)

        def run() -> None:
            with tf.init_scope(), tf.device("CPU:0"):
                for result in function(messages):
                    result.numpy()

        return run

    def everyone(self, value: Any) -> list[Any]:
        return self._collectives.gather_json(value, "network")
