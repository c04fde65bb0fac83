"""Callbacks for Keras 3."""

from __future__ import annotations

import os
from collections.abc import Iterable, MutableMapping
from typing import Any
from weakref import WeakSet

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.tensorflow.keras import callbacks as stock

from horovod_sparse.compressors.checks import check_choice, check_integer
from horovod_sparse.core.checkpoint import Damaged
from horovod_sparse.tensorflow.checkpoint import load_checkpoint, passes_of, save_checkpoint
from horovod_sparse.tensorflow.names import broadcast_variables, plain

_resumed: WeakSet[Any] = WeakSet()
"""Models that were loaded from a checkpoint, on every rank."""


class BroadcastGlobalVariablesCallback(stock.BroadcastGlobalVariablesCallback):
    """Give all workers one worker's weights and optimizer variables after the first batch, but not its residuals.

    It does nothing if `CheckpointCallback` has resumed the model.

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
        if self.broadcast_done or self.model in _resumed:
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


class CheckpointCallback(keras.callbacks.Callback):
    """Save checkpoints, and resume by itself from the newest complete one when `fit` begins. Give it to `fit` on every rank.

    A checkpoint holds the model's variables, the optimizer's, residuals and adaptive state of its compressor, the states of
    the random generators of Keras' layers, NumPy and Python, and how many epochs were done. `fit` then begins with the next.
    It has the number `optimizer.iterations`.
    Training goes on bit for bit if the data have the same order in every epoch, as with `shuffle=False`.

    A callback resumes once: a second `fit` with it continues with what the model is then.

    Args:
        folder: the folder of all checkpoints, on a file system that all hosts share.
        every: a checkpoint is saved after so many epochs. If gradients of several passes are being summed then, it is saved
            at the end of the next epoch where that is not so.
        keep: how many checkpoints are kept, >= 1. Older ones are removed.
        damaged: what happens if a file is missing or was changed: "skip" takes an older checkpoint and warns, "raise" raises.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: in `fit`, on every rank, if a rank could not write, or the checkpoint does not fit.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, every: int = 1, keep: int = 3, damaged: Damaged = "skip"
    ) -> None:
        super().__init__()
        check_integer("every", every, 1)
        check_integer("keep", keep, 1)
        check_choice("damaged", damaged, ("skip", "raise"))
        self._folder, self._every, self._keep = folder, every, keep
        self._damaged: Damaged = damaged
        self._begun = False
        self._since = 0
        """Number of epochs since the last checkpoint."""

    def on_train_begin(self, logs: MutableMapping[str, Any] | None = None) -> None:
        if self._begun:
            return
        self._begun = True
        if not self.model.built:
            raise ValueError("model must be built before fit resumes it; give it an Input, or call it on a batch")
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        found = load_checkpoint(self._folder, damaged=self._damaged, model=self.model, optimizer=self.model.optimizer)
        if found.values:
            _resumed.add(self.model)
            # Keras' own `BackupAndRestore` tells it in the same way.
            self.model._initial_epoch = found.values["epoch"]

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        self._since += 1
        optimizer = self.model.optimizer
        if self._since >= self._every and not passes_of(optimizer):
            self._since = 0
            kept = {"model": self.model, "optimizer": optimizer, "epoch": epoch + 1}
            save_checkpoint(self._folder, int(optimizer.iterations), keep=self._keep, **kept)

    def on_epoch_begin(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        # It has been read. A later `fit` begins at the first epoch.
        self.model._initial_epoch = None


def __getattr__(name: str) -> Any:
    """Say what stands in for a callback of Horovod's that does not work with Keras 3."""
    if name == "BestModelCheckpoint":
        raise AttributeError(
            "BestModelCheckpoint needs Horovod's Spark estimator, which tells it a path; use "
            "keras.callbacks.ModelCheckpoint(path, save_best_only=True), on rank 0"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
