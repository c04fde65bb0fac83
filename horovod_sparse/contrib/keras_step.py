"""The step of a Keras model with local updates: its own `train_step`, and the exchange of how far variables have moved.

Tested by tests/parallel/tf/local.py and tests/parallel/tf/local_programs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from horovod_sparse.contrib.keras_meeting import PLACE, Meeting
from horovod_sparse.contrib.lengths import ENTRIES, sampled
from horovod_sparse.kernels.pool import BufferPool
from horovod_sparse.tensorflow.host import call_host
from horovod_sparse.tensorflow.source import VariableSource

Tensor = Any
Variable = Any


class LocalStep:
    """What takes the place of a model's step while `fit` runs.

    Args:
        model: compiled; it has its variables and a train function.
        source: replaces movements by their means over all workers.
        meeting: where this worker is.
        every: number of batches between two exchanges.
        ahead: the part of the residual by which variables are moved while batches are trained.
    """

    def __init__(self, model: Any, source: VariableSource, meeting: Meeting, every: int, ahead: float) -> None:
        self._model, self._source, self._meeting, self._every, self._ahead = model, source, meeting, every, ahead
        self._own, self.stock = model.train_step, model.train_function
        self.variables, self._optimizers = list(model.trainable_variables), optimizers_of(model)
        self._start = [tf.Variable(one.value, trainable=False) for one in self.variables]
        """The variables when the first batch after an exchange began."""
        self._count, self._steps, *self._decays = (
            tf.Variable(0.0, trainable=False, dtype=tf.float64) for _ in range(2 + len(self._optimizers))
        )
        """Since the last exchange: the batches that have begun, the steps made, and which part of a variable each optimizer's
        decay has taken."""
        self._names, self._pool = source.names.of(self.variables), BufferPool()
        source.extend(self._names, [_wide(one.value) for one in self.variables], self.variables)
        self.exchange = tf.function(self._exchange, autograph=False)
        self.meet = tf.function(lambda: self._meet(False, tf.zeros(1 + ENTRIES + 1, tf.float64)), autograph=False)
        model.train_step = self.train_step
        model.make_train_function(force=True)
        self._traced = model.train_function

    # --- while fit runs ---

    def put(self) -> None:
        """Let the model train by this step."""
        self._model.train_step, self._model.train_function = self.train_step, self._train
        self._forget()

    def take_away(self) -> None:
        """Let the model train by its own step."""
        self._model.train_step, self._model.train_function = self._own, self.stock

    def _train(self, data: Any) -> Any:
        """Take the place of the model's train function."""
        if not self._meeting.place:
            # This training has no callback. An exception has ended the one that had it.
            self.take_away()
            return self.stock(data)
        try:
            return self.run(self._traced, data)
        finally:
            self._meeting.place = ""

    @property
    def waits(self) -> bool:
        """Whether batches have begun since the last exchange."""
        return bool(self._count > 0.0)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of TensorFlow. If it fails, the variables are those of the last exchange."""
        try:
            return function(*arguments)
        except (StopIteration, tf.errors.OutOfRangeError):
            # There was no batch left.
            raise
        except BaseException as error:
            for variable, start in zip(self.variables, self._start, strict=True) if self.waits else ():
                variable.assign(start)
            self._forget()
            self.take_away()
            problem, self._meeting.problem = self._meeting.problem, None
            raise (problem or error) from None

    # --- called while a graph is built, or eagerly ---

    @tf.autograph.experimental.do_not_convert
    def train_step(self, data: Any) -> Any:
        """Train a batch by the model's own step, and exchange if it is time."""
        self._if(self._count == 0.0, self._begin)
        self._count.assign_add(1.0)
        begun = [_number(one.iterations) for one in self._optimizers]
        parts = [_number(one.learning_rate) * one.weight_decay if one.weight_decay else 0.0 for one in self._optimizers]
        operations = _operations()
        logs = self._own(data)
        trained = _operations()[len(operations) :]
        check_variables(self._model, self.variables)
        for optimizer, before, part, decay in zip(self._optimizers, begun, parts, self._decays, strict=True):
            made = _number(optimizer.iterations) - before
            self._steps.assign_add(made)
            decay.assign_add(made * part)
        # An assertion may fail in the batch, which is ordered before nothing: on some workers the exchange would have begun.
        with tf.control_dependencies(trained):
            self._if(self._count >= self._every, self.exchange)
        return logs

    def _if(self, condition: Tensor, function: Callable[[], None]) -> None:
        # The condition is the same on all workers, so that all or none of them reach the collectives.
        function() if self._every == 1 else tf.cond(condition, function, lambda: None)

    def _begin(self) -> None:
        for variable, start in zip(self.variables, self._start, strict=True):
            start.assign(variable.value)
        for variable, begun in zip(self.variables, self._begun(), strict=True) if self._ahead else ():
            variable.assign(begun)

    def _begun(self) -> list[Tensor]:
        """Return the values that the variables began with. What waits is the same until the exchange."""
        starts = [one.read_value() for one in self._start]
        if not self._ahead:
            return starts
        waiting = call_host(self._waiting, (), [], [_wide(one).dtype for one in starts])
        pairs = zip(starts, waiting, strict=True)
        return [tf.cast(_wide(one) + tf.ensure_shape(ahead, one.shape), one.dtype) for one, ahead in pairs]

    def _exchange(self) -> None:
        moved = [_wide(one.value) - _wide(begun) for one, begun in zip(self.variables, self._begun(), strict=True)]
        decays, grows = [*map(self._decay_of, self.variables)], self._meeting.lengths.grow
        growth = self._meet(True, self._sample(moved, decays))
        with tf.control_dependencies([growth]):
            grown = [_grown(*one, growth) for one in zip(moved, self._start, decays, strict=True)] if grows else moved
            means = self._source(grown, self.variables)
        for variable, start, mean in zip(self.variables, self._start, means, strict=True):
            variable.assign(_wide(start) + mean)
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        # After an error the start is needed.
        with tf.control_dependencies(means):
            self._forget()

    def _forget(self) -> None:
        for one in (self._count, self._steps, *self._decays):
            one.assign(0.0)

    def _decay_of(self, variable: Variable) -> Tensor | None:
        """Return the part of itself that weight decay has taken from a variable; None if it does not decay."""
        for optimizer, decay in zip(self._optimizers, self._decays, strict=True):
            # Keras has no public way to ask which variables an optimizer steps, and which of them decay.
            if optimizer.weight_decay and any(one is variable for one in optimizer._trainable_variables):
                return decay.read_value() if optimizer._use_weight_decay(variable) else None
        return None

    def _sample(self, moved: list[Tensor], decays: list[Tensor | None]) -> Tensor:
        """Return the steps made, 256 entries of how far these have moved variables, and the sum of their squares."""
        places, entries = sampled([one.shape.num_elements() for one in moved]), []
        for one, start, decay, at in zip(moved, self._start, decays, places, strict=True):
            if len(at):
                entries.append(_entries(one, at) if decay is None else _entries(one, at) + decay * _entries(start, at))
        found = tf.concat(entries, 0)
        return tf.concat([[self._steps.read_value()], found, [tf.reduce_sum(found * found)]], 0)

    def _meet(self, exchanges: bool, sample: Tensor) -> Tensor:
        """Return s, once all workers are in the same place."""
        with tf.device("CPU:0"):
            here = tf.ensure_shape(call_host(self._meeting.here, (), [], tf.float64), [PLACE])
            line = tf.concat([here, sample], 0)[None]
            lines = self._source.collectives.result("allgather", line, "meeting")
            return tf.ensure_shape(call_host(self._meeting.meet, (exchanges,), [lines], tf.float64), [])

    # --- called from the graph ---

    def _waiting(self) -> list[Any]:
        """Return c/s e for each variable."""
        part, found = self._ahead / self._meeting.lengths.factor(mpi_ops.size()), []
        for name, start in zip(self._names, self._start, strict=True):
            view = self._source.driver.known.residuals.views.get(name, np.zeros((), np.float32))
            lent = self._pool.lend(start.shape.num_elements(), "float64" if start.dtype == tf.float64 else "float32")
            found.append(np.multiply(view, part, out=lent.reshape(start.shape)))
        return found


def optimizers_of(model: Any) -> list[Any]:
    """Return those that step: of a `LossScaleOptimizer` the inner one, of a `MultiOptimizer` all."""
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return list(getattr(inner, "optimizers", [inner]))


def _operations() -> list[Any]:
    """Return what the graph that is being built has; nothing where there is none."""
    return [] if tf.executing_eagerly() else list(tf.compat.v1.get_default_graph().get_operations())


def check_variables(model: Any, before: list[Variable]) -> None:
    """Raise ValueError if there were no variables to train, or if they are others now."""
    now = model.trainable_variables
    if not before or [*map(id, now)] != [*map(id, before)]:
        raise ValueError(
            f"model {model.name!r} must be built before fit with LocalUpdates, and keep its trainable variables, but it had "
            f"{len(before)} before the first batch, and now has {len(now)}; call the model once, and then "
            "hvd.broadcast_variables(model.weights, root_rank=0), and freeze layers before compile"
        )


def _grown(moved: Tensor, start: Variable, decay: Tensor | None, growth: Tensor) -> Tensor:
    """Return a movement times s, but for its decay."""
    grown = moved * tf.cast(growth, moved.dtype)
    return grown if decay is None else grown + tf.cast((growth - 1.0) * decay, moved.dtype) * _wide(start)


def _wide(value: Any) -> Tensor:
    """Return a value with at least the bits of float32."""
    value = tf.convert_to_tensor(value)
    return value if value.dtype == tf.float64 else tf.cast(value, tf.float32)


def _number(value: Any) -> Tensor:
    return tf.cast(tf.convert_to_tensor(value), tf.float64)


def _entries(value: Any, at: Any) -> Tensor:
    return tf.cast(tf.gather(tf.reshape(value, [-1]), at), tf.float64)
