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
from numpy.typing import NDArray

from horovod_sparse.compressors.checks import check_integer, check_number
from horovod_sparse.contrib.keras_movement import Movement, nothing, read
from horovod_sparse.contrib.keras_workers import MovementSource, check_model
from horovod_sparse.contrib.lengths import Lengths
from horovod_sparse.contrib.settings import check_settings
from horovod_sparse.core.agreement import RELEASE, compare, divides
from horovod_sparse.core.binding import check_kind
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.tensorflow.compressors import NoOp, TensorflowCompressor
from horovod_sparse.tensorflow.names import Names

Array = NDArray[Any]

_VALUES = "values of the variables, which hvd.broadcast_variables(model.weights, root_rank=0) before fit makes equal"


class LocalUpdates(keras.callbacks.Callback):
    """Steps of a plain optimizer on each worker alone, and a sparse exchange of how far the trainable variables have moved.

        model.compile(keras.optimizers.AdamW(1e-3), loss)
        model.fit(data, callbacks=[LocalUpdates(SIDCo(0.01)), ...])

    Its module begins with the formulas. Put it first in `callbacks`: those before it see this worker's own variables. The
    variables are read when the first batch after an exchange begins, and nothing is remembered but the residuals e. Workers
    also exchange before validation and at the end of an epoch, so that all have the same variables there. Variables that are
    not trained and have come apart (moving statistics) are averaged then. The states of the optimizers differ.

    Args:
        compression: a compressor of `horovod_sparse.tensorflow`; None exchanges everything.
        every: number of batches between two exchanges, >= 1, a multiple of the model's `steps_per_execution`.
        ahead: c, the part of its residual that a worker's variables have moved already while batches are trained, in [0, 1].
        grow: whether movements grow by s, but for weight decay. None: if the optimizer divides by the size of the gradient,
            as Adam does.

    Raises:
        TypeError: `compression` is no such compressor, or a number is no int.
        ValueError: an argument is not in its range. In `fit`: the model or its optimizer does not go with local updates, or, on
            all workers, they differ in settings or variables.
        RuntimeError: in `fit`, on all workers: they are in different batches. They have the variables of the last exchange.
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
        self._source = MovementSource(self.compression)
        self._workers = self._source.workers
        self._lengths = Lengths()
        self._movement = Movement(self._lengths)
        self._names = Names()
        self._batches = self._exchanges = self._epoch = 0
        self._compares = True
        """Whether the next exchange is to compare everything, which all workers then do."""
        self._trained = False
        """Whether a batch has ended since variables were shared for all to see."""

    def on_train_begin(self, logs: Any = None) -> None:
        if self._source.active:
            optimizer = self._optimizer
            check_model(self.model, optimizer, self.every)
            self._lengths.grow = divides([vars(optimizer)]) if self.grow is None else bool(self.grow)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._source.active and not self._batches:
            # Keras may have begun a batch that never came.
            self._movement.step_back()
            variables = self.model.trainable_variables
            named = dict(zip(self._names.of(variables), variables, strict=True))
            waiting = self._source.waiting({name: tuple(one.shape) for name, one in named.items()})
            part = self.ahead / self._lengths.factor(self._workers.world)
            self._movement.begin(named, self._optimizer, waiting, part)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._source.active:
            self._trained = True
            self._movement.end()
            self._batches += self.model.steps_per_execution
            if self._batches >= self.every:
                self._exchange(f"after batch {batch} of epoch {self._epoch}")

    def on_test_begin(self, logs: Any = None) -> None:
        # An evaluation on one worker alone waits for nobody.
        if self._trained:
            self._share(f"before validation in epoch {self._epoch}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._share(f"at the end of epoch {epoch}")

    def on_train_end(self, logs: Any = None) -> None:
        # Workers that go on would wait for this one.
        self._share("at the end of the training")

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker keeps beside the model and its optimizer: save all three on every worker.

        Raises:
            RuntimeError: batches were trained since the last exchange, so the variables are not shared.
        """
        if self._batches:
            raise RuntimeError(
                f"state must be saved when variables are shared, but {self._batches} batches were trained since the last "
                "exchange; save in on_epoch_end, or after fit"
            )
        lengths, compression = self._lengths.state(), self.compression.state_dict()
        return {"exchanges": self._exchanges, "lengths": lengths, "compression": compression}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, with the same model and settings.

        Raises:
            ValueError: the state is none of `LocalUpdates`, or belongs to other variables; nothing was changed.
        """
        absent = [part for part in ("exchanges", "lengths", "compression") if part not in state]
        if absent:
            raise ValueError(f"state must be what LocalUpdates.state_dict() returned, but it has no {absent}")
        self.compression.load_state_dict(state["compression"])
        self._lengths.load(state["lengths"])
        self._exchanges, self._compares = int(state["exchanges"]), True

    @property
    def _optimizer(self) -> Any:
        """The optimizer that steps: of a `LossScaleOptimizer` the inner one."""
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)

    def _share(self, place: str) -> None:
        """Give all workers the same variables, also those that are not trained."""
        if self._source.active:
            self._exchange(place)
            if self._trained:
                self._average_others()
            self._trained = False

    def _exchange(self, place: str) -> None:
        """Meet all workers in the same place. Exchange how far variables have moved, if batches were trained."""
        batches, self._batches, movement = self._batches, 0, self._movement
        place = f"{place}, {batches} batches after exchange {self._exchanges}"
        if not batches:
            movement.step_back()
            self._meet(place, nothing())
            return
        try:
            self._check_step(movement.measure(self._optimizer))
            found = self._meet(place, movement.sample())
            movement.grow(self._workers.world)
            self._source.exchange(movement.moved)
        except BaseException:
            movement.restore()
            self._compares = True
            raise
        movement.arrive()
        self._exchanges += 1
        if self._lengths.grow:
            self._lengths.note(found)

    def _check_step(self, steps: int) -> None:
        """Raise ValueError if a batch has made variables, or if the optimizer that is known has not moved them."""
        movement, now = self._movement, self.model.trainable_variables
        if [*map(id, now)] != [*map(id, movement.variables.values())]:
            raise ValueError(
                f"model {self.model.name!r} must be built before fit with LocalUpdates, and keep its trainable variables, but "
                f"a batch has changed them from {len(movement.variables)} to {len(now)}; call the model once and then "
                "hvd.broadcast_variables(model.weights, root_rank=0), and freeze layers between two fits"
            )
        moves = not self._exchanges and any(one.any() for one in movement.moved.values())
        if self.grow is None and not steps and moves:
            raise ValueError(
                f"grow must be given to LocalUpdates for model {self.model.name!r}, got None: its variables have moved, but "
                f"the optimizer of compile(), {self._optimizer.name!r}, has made no step; give grow=True if the others divide "
                "by the size of the gradient, as Adam does, and else grow=False"
            )

    def _meet(self, place: str, sample: Array) -> list[float]:
        """Return the mean of the workers' samples. Raise on all workers if they are in different places, or differ."""
        line = np.concatenate([[zlib.crc32(place.encode()), self._compares], sample])
        lines = self._workers.start(Collective("allgather", line[None]))()
        if lines[:, 1].any() or (lines[:, 0] != lines[0, 0]).any():
            self._compare(place)
        mean: list[float] = lines[:, 2:].mean(0).tolist()
        return mean

    def _compare(self, place: str) -> None:
        self._compares = True
        settings: dict[str, str | list[str]] = {
            "release": RELEASE,
            "compression": repr(self.compression),
            "local updates": f"every={self.every}, ahead={self.ahead}, grow={self._lengths.grow}",
            "variables": [f"{name} {one.shape} {one.dtype}" for name, one in self._movement.start.items()],
            _VALUES: [f"{name}: {zlib.crc32(one.tobytes())}" for name, one in self._movement.start.items()],
        }
        everyone, rank = self._workers.everyone([{"place": place}, settings]), self._workers.rank
        try:
            compare({"place": place}, [theirs for theirs, _ in everyone], rank)
        except ValueError as error:
            raise RuntimeError(
                f"{error}. With LocalUpdates all workers must train equally many batches and epochs: give steps_per_epoch, "
                "restore backups on all workers, stop early on all or none, and catch no exception on one alone"
            ) from error
        compare(settings, [theirs for _, theirs in everyone], rank)
        # Before the first batch there is nothing to compare yet.
        self._compares = not self._movement.start

    def _average_others(self) -> None:
        """Average the variables that are not trained and that have come apart, such as moving statistics."""
        others = [one for one in self.model.non_trainable_variables if keras.backend.is_float_dtype(one.dtype)]
        if not others:
            return
        values = [read(one) for one in others]
        bits = np.array([[zlib.crc32(value.tobytes()) for value in values]], np.float64)
        everyones = self._workers.start(Collective("allgather", bits))()
        for variable, value, column in zip(others, values, everyones.T, strict=True):
            if (column != column[0]).any():
                variable.assign(self._workers.start(Collective("allreduce", value))() / self._workers.world)
