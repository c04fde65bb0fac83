"""Callbacks for Keras 3. Tested by tests/parallel/tf/keras3.py."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.keras import callbacks as stock

from horovod_sparse.tensorflow.names import broadcast_variables, plain


class BroadcastGlobalVariablesCallback(stock.BroadcastGlobalVariablesCallback):
    """Give all workers one worker's weights and optimizer variables after the first batch, but not its residuals.

    Args:
        root_rank: the worker whose values all workers get.
        device: the device to broadcast on.
        local_variables: variables that keep their own values on every worker.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        if local_variables is not None and not isinstance(local_variables, Iterable):
            local_variables = [local_variables]
        super().__init__(root_rank, device, [plain(variable) for variable in local_variables or ()])
        self.broadcast_done = False

    def register_local_var(self, var: Any) -> None:
        """Leave a variable out of the broadcast."""
        super().register_local_var(plain(var))

    def on_batch_end(self, batch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        if self.broadcast_done:
            return
        # The states of metrics and random generators are left out, because each worker has its own.
        everything = [*self.model.weights, *self.model.optimizer.variables]
        with tf.device(self.device):
            broadcast_variables([v for v in everything if plain(v).ref() not in self._local_vars], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(stock.MetricAverageCallback):
    """Average the metrics of an epoch over all workers. Put this callback before those that read the metrics.

    Args:
        device: the device to reduce on.
    """

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        if not logs:
            return
        names = sorted(logs)
        with tf.device(self.device):
            values = hvd.allreduce(tf.constant([float(logs[name]) for name in names], tf.float64), name="metrics")
        logs.update(zip(names, values.numpy().tolist(), strict=True))


def __getattr__(name: str) -> Any:
    """Say what stands in for a callback of Horovod's that does not work with Keras 3."""
    if name == "BestModelCheckpoint":
        raise AttributeError(
            "BestModelCheckpoint needs Horovod's Spark estimator, which tells it a path; use "
            "keras.callbacks.ModelCheckpoint(path, save_best_only=True), on rank 0"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
