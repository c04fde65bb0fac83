"""The shared CPU path in a TensorFlow graph: NumPy code, called by `tf.numpy_function`.

Residuals are NumPy's arrays, which the functions called from the graph change in place.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.dense import DenseBucket
from horovod_sparse.core.intake import Arrived
from horovod_sparse.core.layout import Layout, Slot
from horovod_sparse.core.pipeline import AnyBucket, Pipeline, Write
from horovod_sparse.core.step import Ending
from horovod_sparse.exchange.protocols import Exchange, Reduced, Round
from horovod_sparse.exchange.shared import Dense
from horovod_sparse.kernels.pool import BufferPool
from horovod_sparse.numpy.compiled import host_ops
from horovod_sparse.ops.protocol import Array, Momentum
from horovod_sparse.tensorflow.exchange import Collectives

Tensor = Any


@dataclass(frozen=True)
class Step:
    """The gradients of one step and how they are reduced."""

    buckets: Sequence[AnyBucket]
    """The buckets that take part."""
    gradients: Mapping[str, Tensor]
    """Gradients of the parameters in the buckets, by name. A missing gradient counts as zero."""
    others: Mapping[str, Tensor]
    """Values, by name, that are already reduced and only have to be finite."""
    dtypes: Mapping[str, Any]
    """The dtypes of the gradients of all parameters, by name."""
    rate: Tensor
    """The learning rate, float64; NaN if it is unknown."""
    scale: Tensor
    """The loss scale by which the gradients are multiplied, float64; NaN if there is no loss scaler."""
    frozen: Collection[str] = ()
    """Names of parameters that are not trained any more; their residuals and velocities are dropped."""


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


class HostPipeline(Pipeline):
    """A pipeline that is called from a graph. `worker` stands for world, position, rank and averages."""

    def __init__(self, compressor: Compressor, collectives: Collectives, **worker: Any) -> None:
        super().__init__(host_ops(_threads()), compressor, **worker)
        self._collectives = collectives
        self._generation: dict[str, int] = {}
        """Bucket -> the number of buckets that existed when it and those made together with it were added."""
        self._reduced: dict[str, list[NDArray[Any]]] = {}
        """Bucket -> its reduced gradients, flat, kept until the graph takes them."""
        self._pool = BufferPool()
        """Lends the memory of reduced gradients. TensorFlow uses it without a copy; it returns when the last tensor is gone."""
        self._rate: float | None = None
        """The last learning rate that was not 0, if the momentum was Keras'."""
        self._rate_before: float | None = None
        """That of before the last step."""

    def add_buckets(self, layouts: Sequence[Layout], like: Callable[[str], Array] = lambda name: None) -> None:
        generation = len(self.buckets)
        super().add_buckets(layouts, like)
        self._generation.update({bucket.name: generation for bucket in self.buckets[generation:]})

    # --- called while a graph is built ---

    def reduce(self, step: Step) -> dict[str, Tensor]:
        """Build the operations that reduce one step's gradients, and return the reduced gradients by name."""
        reduced: dict[str, Tensor] = {}
        # Only a norm of all gradients must wait for all of them. Otherwise buckets are exchanged while others' gradients are
        # computed.
        awaited = [*step.gradients.values()] if self.compressor.holds_back else []
        with tf.device("CPU:0"):
            start = call_host(self._start_step, (), [step.scale, step.rate, *awaited], tf.bool)
            with tf.control_dependencies([start]):
                for made in self._together(step.buckets):
                    names = [slot.name for bucket in made for slot in bucket.layout.slots]
                    reduced.update(zip(names, self._exchange_all(step, made), strict=True))
                others = [tf.reduce_all(tf.math.is_finite(other)) for other in step.others.values()]
            with tf.control_dependencies(reduced.values()):
                end = call_host(self._end, (list(step.others),), others, tf.bool)
            with tf.control_dependencies([end]):
                return {name: tf.identity(tensor) for name, tensor in reduced.items()}

    def _together(self, buckets: Sequence[AnyBucket]) -> list[list[AnyBucket]]:
        """Group the buckets that are always at the same step of their schedule: those that were made together.

        Those that are always dense go with the first group, so that their collectives run at the same time.
        """
        made: dict[int, list[AnyBucket]] = {}
        for bucket in buckets:
            if isinstance(bucket, Bucket):
                made.setdefault(self._generation[bucket.name] if bucket.begins_dense else 0, []).append(bucket)
        groups = list(made.values()) or [[]]
        groups[0] += [bucket for bucket in buckets if isinstance(bucket, DenseBucket)]
        return [group for group in groups if group]

    def _exchange_all(self, step: Step, buckets: list[AnyBucket]) -> list[Tensor]:
        usual = partial(self._exchange, step, buckets, self.compressor.exchange)
        if not buckets[0].begins_dense:
            return usual()
        reduced: list[Tensor] = tf.cond(
            call_host(self._is_dense, (buckets[0].name,), [], tf.bool),
            partial(self._exchange, step, buckets, Dense()),
            usual,
        )
        return reduced

    def _exchange(self, step: Step, buckets: list[AnyBucket], exchange: Exchange) -> list[Tensor]:
        # TensorFlow runs Python calls in the order in which they are written here. So all buckets are begun before any
        # result is requested, and their collectives run at the same time.
        rounds = {bucket.name: bucket.rounds_of(exchange) for bucket in buckets}
        tensors = {bucket.name: self._begin(step, bucket, rounds[bucket.name][0]) for bucket in buckets}
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
        return [reduced for bucket in buckets for reduced in self._finish_bucket(step, bucket, tensors[bucket.name])]

    def number_of(self, bucket: AnyBucket) -> str:
        """Return the beginning of the names of a bucket's collectives."""
        if isinstance(bucket, DenseBucket):
            return f"dense.{self.dense.index(bucket)}"
        return str(self.buckets.index(bucket))

    def _begin(self, step: Step, bucket: AnyBucket, first: Round) -> Tensor:
        names = [name for name in bucket.slots if name in step.gradients]
        frozen = [name for name in bucket.slots if name in step.frozen]
        inputs, dtype = [step.gradients[name] for name in names], first.dtype or bucket.layout.residual_dtype
        return call_host(self._take_in, (bucket.name, names, frozen), [step.rate, *inputs], dtype)

    def _finish_bucket(self, step: Step, bucket: AnyBucket, result: Tensor) -> list[Tensor]:
        slots = bucket.layout.slots
        types = [step.dtypes[slot.name] for slot in slots]
        reduced = call_host(self._write_out, (bucket.name, types), [result], types)
        return [tf.ensure_shape(tensor, slot.shape) for tensor, slot in zip(reduced, slots, strict=True)]

    # --- called from the graph ---

    def _start_step(self, scale: np.float64, rate: np.float64, *gradients: NDArray[Any]) -> np.bool_:
        self.start_step(gradients, None if math.isnan(scale) else float(scale))
        self._accelerate_by(float(rate))
        return np.True_

    def _accelerate_by(self, rate: float) -> None:
        """Keep the velocity in units of the update if the momentum was Keras': `u = m u + eta g`."""
        correction = self.compressor.momentum_correction
        if correction is None or not self.compressor.takes_momentum:
            return
        former, factor, ahead = self._rate or rate, *correction.of_step
        # It is stored in units of the gradient. A rate of 0 leaves the unit as it was.
        momentum = Momentum(factor * former / rate if rate else factor, ahead)
        self.intake.momentum = lambda name: momentum
        self._rate_before, self._rate = self._rate, rate or self._rate

    def _finish(self) -> None:
        is_undone = self._step is not None and self._step.ending is Ending.UNDONE
        super()._finish()
        if is_undone:
            self._rate = self._rate_before

    def _is_dense(self, name: str) -> np.bool_:
        bucket = self.bucket_of[name]
        return np.bool_(isinstance(bucket, Bucket) and bucket.is_dense)

    def _take_in(
        self, name: str, names: list[str], frozen: list[str], rate: np.float64, *inputs: NDArray[Any]
    ) -> NDArray[Any]:
        bucket = self.bucket_of[name]
        # With rate 0 a gradient adds nothing to the velocity either.
        gradients = dict(zip(names, inputs, strict=True)) if rate else {}
        for parameter in frozen:
            self.drop(parameter)
        learning_rate = None if math.isnan(rate) else float(rate)
        self.arrive_together(
            bucket, [Arrived(slot.name, gradients.get(slot.name), learning_rate) for slot in bucket.layout.slots]
        )
        return np.ascontiguousarray(bucket.begin().message)

    def _advance(self, name: str, dtype: str, result: NDArray[Any]) -> NDArray[Any]:
        bucket = self.bucket_of[name]
        collective = self.advance(bucket, result, self.divisor, self._keep_reduced(bucket))
        if collective is None:
            # The exchange has ended early on all ranks, so the graph's next collective has nothing to carry.
            return np.zeros(1, dtype)
        return np.ascontiguousarray(collective.message)

    def _write_out(self, name: str, types: list[Any], result: NDArray[Any]) -> list[NDArray[Any]]:
        bucket = self.bucket_of[name]
        # An exchange may have ended early.
        exchanging = not self._reduced.get(name)
        if exchanging and self.advance(bucket, result, self.divisor, self._keep_reduced(bucket)) is not None:
            raise RuntimeError(f"the exchange of bucket {name!r} has more rounds than its graph; this is a defect")
        written = []
        for array, slot, dtype in zip(self._reduced.pop(name), bucket.layout.slots, types, strict=True):
            written.append(array.reshape(slot.shape).astype(dtype.as_numpy_dtype, copy=False))
            if dtype.size == 2 and np.isinf(written[-1]).any():
                self.note_overflow(slot.name)
        return written

    def _keep_reduced(self, bucket: AnyBucket) -> Write:
        kept = self._reduced[bucket.name] = []

        def write(slots: Sequence[Slot], reduced: Reduced) -> None:
            # Half-precision sums are rounded once, at the end, instead of after every rank.
            kept.extend(self._pool.lend(slot.numel, bucket.layout.residual_dtype) for slot in slots)
            reduced.write([(slot.offset, flat) for slot, flat in zip(slots, kept, strict=True)])

        return write

    def _end(self, names: list[str], *finite: np.bool_) -> np.bool_:
        for name, is_finite in zip(names, finite, strict=True):
            if not is_finite:
                self.note_not_finite(f"parameter {name!r}")
        self.end_step()
        return np.True_

    def abort(self) -> None:
        self._reduced.clear()
        super().abort()

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({} if self._rate is None else {"rate": self._rate})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._rate = state.get("rate")


def _threads() -> int:
    """Return the number of threads that TensorFlow uses within an operation; it has no function that tells this number."""
    said = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    wanted = int(said) if said.isdigit() else 0
    return int(tf.config.threading.get_intra_op_parallelism_threads()) or wanted or os.cpu_count() or 1
