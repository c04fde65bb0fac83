"""Callbacks for Keras 3 and legacy Keras.

Horovod's callbacks that schedule learning rates (`LearningRateScheduleCallback`, `LearningRateWarmupCallback`) are not here.
They call functions of Keras' backend that are gone once Keras 3 is installed, so they fail with either Keras. Use
`keras.optimizers.schedules` instead, for instance `CosineDecay(..., warmup_target=..., warmup_steps=...)`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.keras.callbacks import BestModelCheckpoint as BestModelCheckpoint
from tensorflow import keras

from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.names import plain
from horovod_sparse.tensorflow.wrappers import broadcast_variables


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Give all workers one worker's weights and optimizer variables after the first batch, but not its residuals.

    Args:
        root_rank: the worker whose values all workers get.
        device: the device to broadcast on.
        local_variables: variables that keep their own values on every worker.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._device = device
        self._local: set[Any] = set()
        self._done = False
        if local_variables is not None and not isinstance(local_variables, Iterable):
            local_variables = [local_variables]
        for variable in local_variables or ():
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leave a variable out of the broadcast."""
        self._local.add(plain(var).ref())

    def on_train_batch_end(self, batch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        if self._done:
            return
        optimizer = self.model.optimizer.variables
        # The states of metrics and random generators are left out, because each worker has its own.
        everything = [*self.model.weights, *(optimizer() if callable(optimizer) else optimizer)]
        with tf.device(self._device):
            broadcast_variables([v for v in everything if plain(v).ref() not in self._local], self._root_rank)
        self._done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Average the metrics of an epoch over all workers. Put this callback before those that read the metrics.

    Args:
        device: the device to reduce on.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._device = device

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        if not logs:
            return
        names = sorted(logs)
        with tf.device(self._device):
            values = hvd.allreduce(tf.constant([float(logs[name]) for name in names], tf.float64), name="metrics")
        logs.update(zip(names, values.numpy().tolist(), strict=True))


class CompressionCheckpoint(keras.callbacks.Callback):
    """Save a compressor's residuals and adaptive state, which no model file holds, after every epoch on every worker.

    Args:
        compression: the optimizer's compressor.
        path: the path of the file, with "{rank}" in it; an older file is replaced when the new one is complete.

    Raises:
        ValueError: the path has no "{rank}" in it.
    """

    def __init__(self, compression: TensorflowCompressor, path: str | os.PathLike[str]) -> None:
        super().__init__()
        if "{rank}" not in os.fspath(path):
            raise ValueError(f"path must have '{{rank}}' in it, since every rank saves its own state, got {path!r}")
        self._compression = compression
        self._path = os.fspath(path)

    @property
    def path(self) -> Path:
        """The path of this rank's file."""
        return Path(self._path.replace("{rank}", str(hvd.rank())))

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        self.save()

    def save(self) -> None:
        """Write the file now."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _replace(self.path, self._compression.serialize())

    def load(self) -> None:
        """Continue from this rank's file. Call this before or after the compressor is given to an optimizer."""
        self._compression.deserialize(self.path.read_bytes())


def _replace(path: Path, content: bytes) -> None:
    """Replace a file's content completely or not at all, even if the machine fails."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
