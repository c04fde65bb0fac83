"""Local updates for Keras 3: a callback by which workers exchange how far their variables have moved.

theta_r are worker r's variables after H = `every` batches from the shared theta, and s the growth of `Lengths`:

    Delta_r = s (theta_r - theta)
    e_r     = e_r + Delta_r
    sent_r  = the entries of e_r that the compressor selects
    e_r     = e_r - sent_r
    theta   = theta + mean(sent_r)

With `ahead` c, worker r begins its batches at theta + c/s e_r, and its movement is counted from there.

Tested by tests/parallel/tf/local.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from horovod.tensorflow import global_process_set, mpi_ops

from horovod_sparse.compressors.checks import check_integer, check_number
from horovod_sparse.contrib.keras_meeting import Meeting
from horovod_sparse.contrib.keras_step import LocalStep, check_variables, optimizers_of
from horovod_sparse.contrib.settings import check_settings
from horovod_sparse.core.agreement import divides
from horovod_sparse.core.binding import check_kind
from horovod_sparse.tensorflow.compressors import NoOp, TensorflowCompressor
from horovod_sparse.tensorflow.keras.optimizer import DistributedApply
from horovod_sparse.tensorflow.reduction import Reduction
from horovod_sparse.tensorflow.source import VariableSource


class LocalUpdates(keras.callbacks.Callback):
    """Steps of a plain optimizer on each worker alone, and a sparse exchange of how far the trainable variables have moved.

        model.compile(keras.optimizers.AdamW(1e-3), loss)
        model.fit(data, callbacks=[LocalUpdates(SIDCo(0.01)), ...])

    Its module begins with the formulas. While `fit` runs, the exchange is part of the model's `train_step`, which reads the
    variables before the first batch after an exchange; nothing is remembered but the residuals e. Workers also exchange before
    validation and at the end of an epoch, if batches were trained since the last exchange. The states of the optimizers
    differ, and so do variables that are not trained (moving statistics). Put it first in `callbacks`.

    Args:
        compression: a compressor of `horovod_sparse.tensorflow`; None exchanges everything.
        every: number of batches between two exchanges, >= 1.
        ahead: c, the part of its residual that a worker's variables have moved already while batches are trained, in [0, 1].
        grow: whether movements grow by s, but for weight decay. None: if the optimizer divides by the size of the gradient,
            as Adam does.

    Raises:
        TypeError: `compression` is no such compressor, or a number is no int.
        ValueError: an argument is not in its range. In `fit`: the model or its optimizer does not go with local updates, or, on
            all workers, their settings differ.
        RuntimeError: in `fit`, on all workers: they are in different batches, or begin with different variables. They have the
            variables of the last exchange.
    """

    def __init__(
        self,
        compression: TensorflowCompressor | None = None,
        *,
        every: int = 1,
        ahead: float = 0.0,
        grow: bool | None = None,
    ) -> None:
        super().__init__()
        check_integer("every", every, 1)
        check_number("ahead", ahead, "in [0, 1]", lambda c: 0.0 <= c <= 1.0)
        self.compression = NoOp() if compression is None else compression
        check_kind(self.compression, TensorflowCompressor, "horovod_sparse.tensorflow", stock=False)
        check_settings(self.compression)
        self.every, self.ahead, self.grow = int(every), float(ahead), grow
        reduction = Reduction(mpi_ops.Average, 1.0, None, True, global_process_set)
        self._source = VariableSource(self.compression, reduction, shared=False)
        self._source.settings = self._settings
        self._meeting = Meeting(grow)
        self._step: LocalStep | None = None
        self._epoch = self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if not self._source.active:
            return
        model = self.model
        check_variables(model, model.trainable_variables)
        _check_compiled(model)
        left = getattr(model.train_step, "__self__", None)
        if isinstance(left, LocalStep):
            # An exception of another callback has ended a training.
            left.take_away()
            model.train_function = None
        model.make_train_function()
        if self._step is None or self._step.stock is not model.train_function:
            divide = divides(map(vars, optimizers_of(model)))
            self._meeting.lengths.grow = divide if self.grow is None else bool(self.grow)
            self._step = LocalStep(model, self._source, self._meeting, self.every, self.ahead)
        self._step.put()
        values = b"".join(np.asarray(one).tobytes() for one in self._step.variables)
        self._meet(f"at the beginning of fit, variables with checksum {zlib.crc32(values)}")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batches = epoch, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._meeting.place = f"in batch {batch} of epoch {self._epoch}"

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches = batch + 1

    def on_test_begin(self, logs: Any = None) -> None:
        # An evaluation on one worker alone waits for nobody.
        if self._waits:
            self._meet(f"before validation in epoch {self._epoch}, {self._batches} batches")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._meet(f"at the end of epoch {epoch}, {self._batches} batches")

    def on_train_end(self, logs: Any = None) -> None:
        # Workers that go on would wait for this one.
        self._meet("at the end of fit")
        if self._step is not None:
            self._step.take_away()

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker keeps beside the model and its optimizer: save all three on every worker.

        Raises:
            RuntimeError: batches were trained since the last exchange, so the variables are not shared.
        """
        if self._waits:
            raise RuntimeError(
                "state must be saved when variables are shared, but batches were trained since the last exchange; save in "
                "on_epoch_end, or after fit"
            )
        lengths, compression = self._meeting.lengths.state(), self.compression.state_dict()
        return {"exchanges": self._meeting.exchanges, "lengths": lengths, "compression": compression}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, with the same model and settings.

        Raises:
            ValueError: the state is none of `LocalUpdates`, or belongs to other variables; nothing was changed.
        """
        absent = [part for part in ("exchanges", "lengths", "compression") if part not in state]
        if absent:
            raise ValueError(f"state must be what LocalUpdates.state_dict() returned, but it has no {absent}")
        self.compression.load_state_dict(state["compression"])
        self._meeting.lengths.load(state["lengths"])
        self._meeting.exchanges = int(state["exchanges"])

    @property
    def _waits(self) -> bool:
        """Whether batches were trained since the last exchange."""
        return self._step is not None and self._step.waits

    def _meet(self, place: str) -> None:
        """Meet all workers in a place of the training, and exchange what is left there."""
        if self._step is not None:
            self._meeting.place = place
            self._step.run(self._step.exchange if self._step.waits else self._step.meet)

    def _settings(self) -> dict[str, str]:
        """Return what must be equal on all workers."""
        return {"local updates": f"every={self.every}, ahead={self.ahead}, grow={self._meeting.lengths.grow}"}


def _check_compiled(model: Any) -> None:
    """Raise ValueError if how a model was compiled does not go with local updates."""
    if model.jit_compile:
        raise ValueError(
            f"jit_compile must be False in compile() of model {model.name!r} with LocalUpdates, got True (Keras' default where "
            "there is a GPU): XLA cannot compile Horovod's collectives; use model.compile(..., jit_compile=False)"
        )
    for optimizer in optimizers_of(model):
        if optimizer.use_ema:
            raise ValueError(
                f"use_ema of optimizer {optimizer.name!r} must be False with LocalUpdates, got True: each worker would average "
                "its own variables; average them in a callback after LocalUpdates"
            )
        if isinstance(vars(optimizer).get("apply"), DistributedApply):
            raise ValueError(
                f"optimizer must be a plain one with LocalUpdates, but {optimizer.name!r} is distributed: its gradients would "
                "be averaged too; leave hvd.DistributedOptimizer out"
            )
