"""Replaces Horovod's reduction of gradients when the compression is one of ours, for both tapes and optimizers.

There is one `Reducer` per compressor. It takes the place of the function that stock Horovod's `_make_allreduce_grads_fn`
returns. The reduction of a variable is planned when its first gradient is seen, also while a `tf.function` is traced. The
ranks compare their settings then, so that a difference raises on all of them instead of hanging.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from horovod_sparse import kernels
from horovod_sparse.core.agreement import (
    RELEASE,
    check_arguments,
    check_sparse,
    compare,
    is_elastic,
    refuse_detached,
    refuse_updates,
)
from horovod_sparse.core.binding import compresses
from horovod_sparse.core.layout import Layout, Parameter, check_limits, planned
from horovod_sparse.core.lengths import sampled
from horovod_sparse.core.pipeline import AnyBucket
from horovod_sparse.core.state import check_state, kept_shapes, merged, part_of
from horovod_sparse.core.store import Store, log_start
from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.exchange import Collectives
from horovod_sparse.tensorflow.host import HostPipeline, Step, call_host
from horovod_sparse.tensorflow.names import Names, renamed
from horovod_sparse.tensorflow.reduction import Reduction

Tensor = Any
Variable = Any

_agreed: Counter[tuple[int, ...]] = Counter()
"""How many reducers have agreed so far, by process set: the number of the next one, on all ranks. One that a single rank has
made does not count. The key includes the ranks because Horovod gives the number of a removed set to the next one."""
_made: Counter[str] = Counter()
"""How many compressors have begun to serve tapes, by their settings."""
_SUSPICIOUS = 10
unmet: WeakSet[Reducer] = WeakSet()
"""Those that serve tapes and have not met the optimizer that steps with what they reduce."""


class Reducer(Store):
    """Reduces lists of gradients. If `shared`, it serves one tape after the other, else one optimizer."""

    compressor: TensorflowCompressor
    pipeline: HostPipeline | None = None

    def __init__(self, compressor: TensorflowCompressor, reduction: Reduction, *, shared: bool) -> None:
        if is_elastic():
            raise RuntimeError(
                f"compression must be hvd.Compression.none in an elastic job of TensorFlow, got {compressor!r}: residuals do "
                "not follow the workers; start the job without --min-np and --host-discovery-script, or use PyTorch"
            )
        super().__init__()
        self.reduction = reduction
        self.shared = shared
        self.settings: Callable[[], Mapping[str, str]] = dict
        """Returns the optimizer's settings by name, which must also be equal on all ranks."""
        self.compressor = compressor
        self.names = Names()
        self._process_set = reduction.process_set
        self._collectives = Collectives(self._process_set)
        self._agreements = 0
        """Number of agreements with the other ranks so far: one whenever variables join."""
        self._dtypes: dict[str, Any] = {}
        """Variable name -> dtype of its gradient, for all variables that have had a gradient."""
        self.sparse: list[str] = []
        # The gradients of embeddings have a different number of rows in every step.
        self._function = tf.function(self._reduce, autograph=False, reduce_retracing=True)
        self.active = self._process_set.included() and compresses(self._process_set.size())
        compressor.bind(self)
        if shared:
            unmet.add(self)

    # --- gradients in, reduced gradients out ---

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Variable] | None = None,
        use_generic_names: bool = False,
        *,
        learning_rate: Tensor | None = None,
        loss_scale: Tensor | None = None,
    ) -> list[Any]:
        """Return the reduced gradients, in the same order. None stays None, unless the variable had a gradient before.

        It also stays None for a Keras variable that is not trainable any more, which may also be left out; its residual and
        velocity are dropped then. `use_generic_names` is ignored: the names of collectives never depend on those of tensors.
        With a loss scaler, `loss_scale` is its scale (`Pipeline.start_step`).

        Raises:
            ValueError: some variables of a bucket are missing, or the ranks differ.
        """
        if variables is None or len(variables) != len(gradients):
            raise ValueError("variables must be given, one for each gradient, so that residuals can be told apart")
        names = tuple(self.names.of(variables))
        if self.reduction.sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        if not self.active:
            return list(gradients)
        if tf.config.functions_run_eagerly():
            raise RuntimeError(
                "tf.config.run_functions_eagerly must be False with a sparsifier, got True: collectives have no names of "
                "their own where functions are called eagerly; for Keras use model.compile(run_eagerly=True)"
            )
        rate, scale = (
            tf.constant(math.nan, tf.float64) if one is None else tf.cast(one, tf.float64)
            for one in (learning_rate, loss_scale)
        )
        if learning_rate is None and self.compressor.in_updates:
            raise ValueError(
                "lr_in_residual must be False with a gradient tape, which does not tell the learning rate; use a Keras 3 "
                "optimizer with hvd.DistributedOptimizer"
            )
        self._extend(names, gradients, variables)
        given = {name for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
        frozen = self.names.frozen({*names, *self._planned} - given)
        reduce = self._function if tf.executing_eagerly() else self._reduce
        return list(reduce(self._agreements, names, frozen, list(gradients), rate, scale))

    def means_of_updates(self, updates: Sequence[Tensor], variables: Sequence[Variable]) -> list[Tensor]:
        """Return the means of the workers' updates, each of which grows first (`Lengths`)."""
        factor = call_host(self.lengths.factor, (self._process_set.size(),), [], tf.float64)
        reduced: list[Tensor] = self([update * tf.cast(factor, update.dtype) for update in updates], variables)
        if self.pipeline is not None:
            positions = zip(updates, sampled([math.prod(update.shape) for update in updates]), strict=True)
            flat = tf.concat([tf.cast(tf.gather(tf.reshape(one, [-1]), at), tf.float64) for one, at in positions], 0)
            sample = tf.concat([flat, [tf.reduce_sum(flat * flat)]], 0)
            total = self._collectives.result_in_every_step("allreduce", sample, "sample")
            call_host(self.lengths.note, (), [total / self._process_set.size()], [])
        return reduced

    def _reduce(
        self,
        agreements: int,
        names: tuple[str, ...],
        frozen: frozenset[str],
        gradients: list[Any],
        rate: Tensor,
        scale: Tensor,
    ) -> list[Any]:
        """Build the operations. They are traced again when new `agreements` give buckets for more variables."""
        if self.pipeline is None:
            # No variable has had a gradient yet.
            return gradients
        given = {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
        others = {name: self._gather_slices(name, given.get(name)) for name in names if name in self.sparse}
        reduced = self.pipeline.reduce(
            Step(
                buckets=self._taking_part(names, frozen),
                gradients={name: gradient for name, gradient in given.items() if name not in others},
                frozen=frozen,
                others={name: slices.values for name, slices in others.items()},
                dtypes=self._dtypes,
                rate=rate,
                scale=scale,
            )
        )
        return [None if name in frozen else others.get(name, reduced.get(name)) for name in names]

    def _gather_slices(self, name: str, gradient: Any) -> Any:
        """Return all ranks' slices of an embedding's gradient, as stock Horovod reduces them. None counts as no slices."""
        shape, dtype = self.names.shape(name), self._dtypes[name]
        if gradient is None:
            gradient = tf.IndexedSlices(tf.zeros((0, *shape[1:]), dtype), tf.zeros(0, tf.int64))
        elif not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.IndexedSlices(gradient, tf.range(shape[0], dtype=tf.int64))
        number = self.sparse.index(name)
        given = gradient.values, tf.cast(gradient.indices, tf.int64)
        values, indices = (
            self._collectives.result_in_every_step("allgather", part, f"sparse.{number}.{kind}")
            for part, kind in zip(given, ("values", "indices"), strict=True)
        )
        divisor = tf.constant(self._process_set.size() if self.reduction.averages else 1, dtype)
        return tf.IndexedSlices(values / divisor, indices, tf.constant(shape, tf.int64))

    @property
    def _planned(self) -> Mapping[str, AnyBucket]:
        """The variables that have been planned, except those with sparse gradients, and their buckets."""
        return {} if self.pipeline is None else self.pipeline.bucket_of

    def _taking_part(self, names: Sequence[str], frozen: Collection[str]) -> list[AnyBucket]:
        """Return the buckets of some variables. All others in them must be frozen: what was sent for them would be lost."""
        buckets = {self._planned[name].name: self._planned[name] for name in names if name in self._planned}
        for bucket in buckets.values():
            absent = [name for name in bucket.slots if name not in (*names, *frozen)]
            if absent:
                raise ValueError(
                    f"variables must be all of those that were first reduced together, but {absent} are not there; give every "
                    "tape or optimizer a compression of its own, or use granularity='layer'"
                )
        return list(buckets.values())

    # --- planning ---

    def _extend(self, names: Sequence[str], gradients: Sequence[Any], variables: Sequence[Variable]) -> None:
        """Plan for variables that have a gradient for the first time.

        Errors that can occur on one rank alone are found before the ranks compare, so that all of them raise.
        """
        new = {
            name: gradient
            for name, gradient in zip(names, gradients, strict=True)
            if gradient is not None and name not in self._dtypes
        }
        if not new:
            return
        sparse = [name for name, gradient in new.items() if isinstance(gradient, tf.IndexedSlices)]
        try:
            buckets, dense = self._lay_out(new, sparse, self.reduction.group_numbers(variables, self.names))
            deferred = self._deferred_for([*buckets, *dense])
        except Exception as error:
            # Every kind of error is caught: a damaged state raises others than ValueError.
            self._agree(names, new, sparse, f"{type(error).__name__}: {error}")
            raise
        self._agree(names, new, sparse, "")
        is_first = self.pipeline is None
        pipeline = self.pipeline = self.pipeline or self._make_pipeline()
        pipeline.add_buckets(buckets)
        pipeline.add_dense(dense, lambda name: None)
        if is_first:
            log_start(pipeline, kernels.variant(), self.updates)
        self.sparse.extend(sparse)
        self._dtypes.update({name: gradient.dtype for name, gradient in new.items()})
        if deferred is not None:
            self.load_compression_state(merged(pipeline.state_dict(), deferred))

    def _lay_out(
        self, new: Mapping[str, Any], sparse: Sequence[str], groups: Mapping[str, int]
    ) -> tuple[list[Layout], list[Layout]]:
        """Return the layouts of the buckets of new variables, and those of the variables that are reduced dense."""
        parameters = []
        for name, gradient in new.items():
            if name in sparse:
                continue
            if not gradient.dtype.is_floating:
                raise ValueError(
                    f"the gradient of variable {name!r} must be of a floating-point type, got {gradient.dtype.name}; keep its "
                    "real and imaginary parts in two variables, or leave it out of the distributed tape or optimizer"
                )
            residual = self.compressor.residual_dtype_of(gradient)
            parameters.append(Parameter(name, self.names.shape(name), residual, "cpu", groups.get(name)))
        buckets, dense = planned(parameters, self.compressor, self._process_set.size())
        check_limits(buckets, self.compressor, self._process_set.size())
        return buckets, dense

    def _deferred_for(self, layouts: Sequence[Layout]) -> Mapping[str, Any] | None:
        """Return the deferred state by the names that variables have now, after a check of the part for new variables."""
        if self.deferred is None:
            return None
        self.check_unit(self.deferred)
        shapes = {slot.name: slot.shape for layout in layouts for slot in layout.slots}
        residuals, velocities = kept_shapes(shapes, self.compressor)
        deferred = renamed(self.deferred, {**residuals, **velocities})
        check_state(part_of(deferred, {*residuals, *velocities}), self.compressor, residuals, velocities)
        return deferred

    def _make_pipeline(self) -> HostPipeline:
        return HostPipeline(
            self.compressor,
            self._collectives,
            world=self._process_set.size(),
            position=self._process_set.rank(),
            rank=mpi_ops.rank(),
            averages=self.reduction.averages,
        )

    def _agree(self, names: Sequence[str], new: Mapping[str, Any], sparse: Sequence[str], problem: str) -> None:
        """Compare settings with the other ranks. This blocks. `problem` is the error that stops this rank, if any."""
        key = (self._process_set.process_set_id, *self._process_set.ranks)
        number = _agreed[key] if self._agreements == 0 else self._collectives.number
        mine: dict[str, str | list[str]] = {
            "release": RELEASE,
            "variables": [
                f"{n} {self.names.shape(n)} {g.dtype.name}{' sparse' * (n in sparse)}" for n, g in new.items()
            ],
            "problem": problem,
            "compression": repr(self.compressor),
            "undoes failed steps": str(self.undoes),
            "op": self.reduction.op_name,
            "sparse_as_dense": str(self.reduction.sparse_as_dense),
            **self.settings(),
            "optimizer": f"number {number} of this process set, its agreement number {self._agreements}",
        }
        everyone = self._collectives.agree(mine, self._first_collective(names))
        compare(mine, everyone, mpi_ops.rank())
        if self._agreements == 0:
            self._collectives.number = number
            _agreed[key] += 1
        self._agreements += 1
        check_sparse(sparse, self.compressor, sparse_as_dense=self.reduction.sparse_as_dense, rank=mpi_ops.rank())

    def _first_collective(self, names: Sequence[str]) -> str | None:
        """Return the collective that a step of these variables begins with; None if no variable is planned yet."""
        for name in names:
            if self.pipeline is not None and name in self._planned:
                return f"{self.pipeline.number_of(self.pipeline.bucket_of[name])}.0"
        return next((f"sparse.{number}.values" for number, name in enumerate(self.sparse) if name in names), None)

    # --- statistics and state: see `Store` ---

    def between_steps(self) -> HostPipeline | None:
        """Return the pipeline. A step that has failed is given up."""
        if self.pipeline is not None:
            self.pipeline.abort()
        return self.pipeline

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the variables that have been planned, and keep the rest until its variables are."""
        kept = () if self.pipeline is None else (self.pipeline.residuals, self.pipeline.velocities)
        self._load(renamed(state, {name for arrays in kept for name in arrays.shapes}), {*self._planned})


def reducer_of(compressor: TensorflowCompressor, reduction: Reduction, *, shared: bool) -> Reducer:
    """Return the reducer that a compressor is bound to, or a new one if there is none.

    One compressor serves one optimizer or, if `shared`, tapes that all reduce in the same way.
    """
    check_arguments(reduction.op, mpi_ops.Average, mpi_ops.Sum, mpi_ops.Adasum, reduction.groups, compressor)
    bound = compressor.store
    if not (shared and isinstance(bound, Reducer) and bound.shared):
        compressor.check_free()
        refuse_detached(compressor, "TensorFlow")
        if shared:
            refuse_updates(compressor, "a gradient tape, which does not see the optimizer")
            _made[repr(compressor)] += 1
            if compressor.residual and _made[repr(compressor)] == _SUSPICIOUS:
                warnings.warn(
                    f"horovod_sparse: {compressor!r} is number {_SUSPICIOUS} that serves tapes with these settings; if every "
                    "step makes a compressor, its residual is lost: make the compressor once, outside of the step",
                    stacklevel=1,
                )
        return Reducer(compressor, reduction, shared=shared)
    bound.reduction.check_same(reduction)
    return bound
