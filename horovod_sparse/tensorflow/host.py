"""The shared CPU path in a TensorFlow graph: NumPy code, called by `tf.numpy_function`.

Residuals are NumPy's arrays, which the functions called from the graph change in place.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from horovod_sparse import kernels
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.driver import log_start
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.core.layout import Layout, Slot
from horovod_sparse.core.plan import first_sparse_step
from horovod_sparse.core.step import Step
from horovod_sparse.core.store import Store
from horovod_sparse.exchange.protocols import Collective, Exchange, Reduced, Round
from horovod_sparse.exchange.shared import Dense
from horovod_sparse.kernels.pool import BufferPool
from horovod_sparse.numpy.compiled import host_ops
from horovod_sparse.tensorflow.exchange import Collectives
from horovod_sparse.tensorflow.names import load_renamed

Tensor = Any
_DENSE = Dense()


@dataclass(frozen=True)
class Given:
    """The gradients of one step and how they are reduced."""

    gradients: Mapping[str, Tensor]
    """Gradients of the parameters in buckets, by name. What waits of the others in these buckets waits on."""
    own: Mapping[str, Tensor]
    """Values, by name, of gradients that are reduced without a bucket."""
    others: Mapping[str, Tensor]
    """The same when they have been reduced."""
    dtypes: Mapping[str, Any]
    """The dtypes of the gradients of all parameters, by name."""
    rate: Tensor
    """The learning rate, float64; NaN if it is unknown."""
    scale: Tensor
    """The loss scale by which the gradients are multiplied, and residuals are not, float64."""


def call_host(method: Callable[..., Any], known: tuple[Any, ...], inputs: Sequence[Tensor], types: Any) -> Any:
    """Return an operation that calls a method with the arguments known now, followed by the operation's inputs.

    TensorFlow keeps alive every function that a graph calls, so the operation holds only a weak reference to the object.
    """
    weak = weakref.WeakMethod(method)

    def call(*inputs: Any) -> Any:
        method = weak()
        if method is None:
            raise RuntimeError(
                "the compression that a function was traced with is gone; keep it as long as the function, outside of it"
            )
        return method(*known, *inputs)

    return tf.numpy_function(call, inputs, types)


class HostDriver(Store):
    """Runs steps from a graph. `worker` stands for world, position, rank and averages."""

    def __init__(self, compressor: Compressor, collectives: Collectives, **worker: Any) -> None:
        super().__init__(compressor)
        self._collectives = collectives
        self._new_feedback = partial(Feedback, host_ops(_threads()), compressor, **worker)
        self._begins_dense = first_sparse_step(compressor, worker["world"]) > 0
        """Whether everything is sent in the first steps."""
        self._generation: dict[str, int] = {}
        """Bucket -> the number of buckets that existed when it and those made together with it were added."""
        self._ended: set[str] = set()
        """The buckets whose exchange has ended in this step."""
        self._reduced: dict[str, list[NDArray[Any]]] = {}
        """Bucket -> its reduced gradients, flat, kept until the graph takes them."""
        self._pool = BufferPool()
        """Lends the memory of reduced gradients. TensorFlow uses it without a copy; it returns when the last tensor is gone."""

    def extend(self, layouts: Sequence[Layout], advice: str) -> None:
        """Add buckets. Log in the first step what is compressed, and `advice`."""
        is_first = self.feedback is None
        feedback = self.feedback = self.feedback or self._new_feedback()
        generation = len(feedback.buckets)
        feedback.add_buckets(layouts, lambda name: None)
        self._generation.update({bucket.name: generation for bucket in feedback.buckets[generation:]})
        if is_first:
            log_start(feedback, kernels.variant(), advice)

    def load(self, state: Mapping[str, Any]) -> None:
        load_renamed(self, state)

    def drop(self) -> None:
        self._ended.clear()
        self._reduced.clear()
        super().drop()

    @property
    def known(self) -> Feedback:
        """What lasts, once there are buckets."""
        assert self.feedback is not None
        return self.feedback

    @property
    def begun(self) -> Step:
        """The step that has begun."""
        assert self.step is not None
        return self.step

    # --- called while a graph is built ---

    def reduce(self, given: Given) -> dict[str, Tensor]:
        """Build the operations that reduce one step's gradients, and return the reduced gradients by name.

        Buckets in which no parameter has a gradient take no part.
        """
        buckets = [bucket for bucket in self.known.buckets if not given.gradients.keys().isdisjoint(bucket.slots)]
        reduced: dict[str, Tensor] = {}
        with tf.device("CPU:0"):
            start = call_host(self._start_step, (), [given.scale], tf.bool)
            with tf.control_dependencies([start]):
                ended = [one for made in self._together(buckets) for one in self._exchange_all(given, made)]
                finite = [
                    tf.reduce_all(tf.math.is_finite(one)) for one in (*given.others.values(), *given.own.values())
                ]
            with tf.control_dependencies(ended):
                end = call_host(self._end, ([*given.others],), finite, tf.bool)
            with tf.control_dependencies([end]):
                for bucket in buckets:
                    reduced.update(self._results(given, bucket))
        return reduced

    def _together(self, buckets: Sequence[Bucket]) -> list[list[Bucket]]:
        """Group the buckets that are always at the same step of their schedule: those that were made together.

        Those that are always dense go with the first group, so that their collectives run at the same time.
        """
        made: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            if not bucket.layout.is_dense:
                made.setdefault(self._generation[bucket.name] if self._begins_dense else 0, []).append(bucket)
        groups = list(made.values()) or [[]]
        groups[0] += [bucket for bucket in buckets if bucket.layout.is_dense]
        return [group for group in groups if group]

    def _exchange_all(self, given: Given, buckets: list[Bucket]) -> list[Tensor]:
        usual = partial(self._exchange, given, buckets, self.compressor.exchange)
        changing = [bucket.name for bucket in buckets if not bucket.layout.is_dense]
        if not (changing and self._begins_dense):
            return usual()
        ended: list[Tensor] = tf.cond(
            call_host(self._are_dense, (changing,), [], tf.bool),
            partial(self._exchange, given, buckets, _DENSE),
            usual,
        )
        return ended

    def _exchange(self, given: Given, buckets: list[Bucket], exchange: Exchange) -> list[Tensor]:
        # TensorFlow runs Python calls in the order in which they are written here. So all buckets are begun before any
        # result is requested, and their collectives run at the same time.
        rounds = {one.name: one.rounds_of(_DENSE if one.layout.is_dense else exchange) for one in buckets}
        tensors = {bucket.name: self._begin(given, bucket, rounds[bucket.name][0]) for bucket in buckets}
        for number in range(max(map(len, rounds.values()))):
            going_on = [bucket for bucket in buckets if number < len(rounds[bucket.name])]
            if number > 0:
                for bucket in going_on:
                    name, dtype = bucket.name, rounds[bucket.name][number].dtype or bucket.layout.residual_dtype
                    tensors[name] = call_host(self._advance, (name, dtype), [tensors[name]], dtype)
            # Names use numbers, because a variable's name may contain characters that an operation's name must not. They are
            # the same for all exchanges: if only some ranks are in their dense steps, Horovod raises on all of them.
            for bucket in going_on:
                name, kind = f"{self.number_of(bucket)}.{number}", rounds[bucket.name][number].kind
                tensors[bucket.name] = self._collectives.result(kind, tensors[bucket.name], name)
        return [call_host(self._conclude, (bucket.name,), [tensors[bucket.name]], tf.bool) for bucket in buckets]

    def number_of(self, bucket: Bucket) -> str:
        """Return the beginning of the names of a bucket's collectives."""
        return str(self.known.buckets.index(bucket))

    def _begin(self, given: Given, bucket: Bucket, first: Round) -> Tensor:
        names = [name for name in bucket.slots if name in given.gradients]
        inputs, dtype = [given.gradients[name] for name in names], first.dtype or bucket.layout.residual_dtype
        return call_host(self._add, (bucket.name, names), [given.rate, *inputs], dtype)

    def _results(self, given: Given, bucket: Bucket) -> dict[str, Tensor]:
        """Return the reduced gradients of a bucket's parameters that have a gradient, once the step has ended."""
        names = [name for name in bucket.slots if name in given.gradients]
        types = [given.dtypes[name] for name in names]
        reduced = call_host(self._hand_out, (bucket.name, names, types), [], types)
        return {name: tf.ensure_shape(one, bucket.slots[name].shape) for name, one in zip(names, reduced, strict=True)}

    # --- called from the graph ---

    def _start_step(self, scale: np.float64) -> np.bool_:
        # A step that has failed has never been.
        self.drop()
        self.step = Step(self.known, float(scale))
        return np.True_

    def _are_dense(self, names: list[str]) -> np.bool_:
        """Return whether buckets that were made together send everything in this step.

        One that took no part in some steps goes on with the others' step.
        """
        buckets = [self.known.bucket_of[name] for name in names]
        step = max(bucket.state.step for bucket in buckets)
        for bucket in buckets:
            bucket.state.step = step
            bucket.go_on(bucket.state)
        return np.bool_(buckets[0].stage.is_dense)

    def _add(self, name: str, names: list[str], rate: np.float64, *inputs: NDArray[Any]) -> NDArray[Any]:
        step, gradients = self.begun, dict(zip(names, inputs, strict=True))
        learning_rate = None if math.isnan(rate) else float(rate)
        for one in self.known.bucket_of[name].slots:
            step.add(one, gradients.get(one), learning_rate)
        return self._message(step.sendings[name].begin())

    def _advance(self, name: str, dtype: str, result: NDArray[Any]) -> NDArray[Any]:
        following = self.begun.advance([(self.begun.sendings[name], result)])
        if following:
            return self._message(following[0][1])
        # The exchange has ended early on all ranks, so the graph's next collective has nothing to carry.
        self._ended.add(name)
        return np.zeros(1, dtype)

    def _message(self, collective: Collective) -> NDArray[Any]:
        return np.ascontiguousarray(collective.message)

    def _conclude(self, name: str, result: NDArray[Any]) -> np.bool_:
        step = self.begun
        if name not in self._ended and step.advance([(step.sendings[name], result)]):
            raise RuntimeError(f"the exchange of bucket {name!r} has more rounds than its graph; this is a defect")
        return np.True_

    def _end(self, names: list[str], *finite: np.bool_) -> np.bool_:
        if not all(finite[: len(names)]):
            # They are so on all ranks; this rank names its own.
            own = zip(names, finite[len(names) :], strict=True)
            self.begun.fail([name for name, is_finite in own if not is_finite])
        step, self.step = self.begun, None
        self._ended.clear()
        step.finish(self._keep)
        return np.True_

    def _keep(self, slots: Sequence[Slot], reduced: Reduced) -> None:
        bucket = self.known.bucket_of[slots[0].name]
        # Half-precision sums are rounded once, at the end, instead of after every rank.
        kept = [self._pool.lend(slot.numel, bucket.layout.residual_dtype) for slot in slots]
        reduced.write([(slot.offset, flat) for slot, flat in zip(slots, kept, strict=True)])
        self._reduced[bucket.name] = kept

    def _hand_out(self, name: str, names: list[str], types: list[Any]) -> list[NDArray[Any]]:
        bucket, feedback = self.known.bucket_of[name], self.known
        slots, arrays = bucket.slots, dict(zip(bucket.slots, self._reduced.pop(name), strict=True))
        for one in slots.keys() - names:
            # Not a number: a gradient of the bucket was not finite.
            if arrays[one].any() and not np.isnan(arrays[one]).any():
                raise RuntimeError(
                    f"rank {feedback.rank}: variable {one!r} must have a gradient on all ranks or on none, but it has none "
                    "here: with stock Horovod the others would wait for ever; give zeros for variables that are unused on "
                    "some ranks"
                )
        with np.errstate(over="ignore"):
            return [
                arrays[one].reshape(slots[one].shape).astype(dtype.as_numpy_dtype, copy=False)
                for one, dtype in zip(names, types, strict=True)
            ]


def _threads() -> int:
    """Return the number of threads that TensorFlow uses within an operation; it has no function that tells this number."""
    said = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    wanted = int(said) if said.isdigit() else 0
    return int(tf.config.threading.get_intra_op_parallelism_threads()) or wanted or os.cpu_count() or 1
