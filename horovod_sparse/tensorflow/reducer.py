"""What replaces Horovod's reduction of gradients when the compression is one of ours: for tapes and optimizers alike.

One `Reducer` per compressor. It stands where stock Horovod has the function that `_make_allreduce_grads_fn` returns. What
is reduced is planned when a variable is first seen, also while a `tf.function` is traced; the ranks compare their
settings then, so that a difference raises on all of them instead of hanging.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod import tensorflow as hvd
from horovod.tensorflow import mpi_ops

from horovod_sparse.agreement import check_sparse, compare, digest
from horovod_sparse.buckets import Layout, Parameter, Slot, plan
from horovod_sparse.cost import allreduce_bytes
from horovod_sparse.pipeline import Bucket
from horovod_sparse.serving import empty_state
from horovod_sparse.statistics import Stats, StepStats
from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.exchange import Collectives
from horovod_sparse.tensorflow.graph import GraphBucket, GraphPipeline
from horovod_sparse.tensorflow.host import HostPipeline
from horovod_sparse.tensorflow.names import Names, plain, renamed
from horovod_sparse.tensorflow.step import Step

Tensor = Any
Variable = Any

_FORCE = "HOROVOD_SPARSE_FORCE"

# Reducers made so far per process set; see the torch adapter.
_made: Counter[tuple[int, ...]] = Counter()


class Reducer:
    """Reduces lists of gradients.

    Args:
        compressor: the `compression` that was given to Horovod; it becomes this reducer's.
        op: hvd.Average or hvd.Sum.
        predivide: `gradient_predivide_factor`.
        groups: as for `hvd.DistributedGradientTape`.
        sparse_as_dense: whether `tf.IndexedSlices` are compressed like other gradients.
        process_set: the workers that exchange.
    """

    def __init__(
        self,
        compressor: TensorflowCompressor,
        *,
        op: Any,
        predivide: float,
        groups: Any,
        sparse_as_dense: bool,
        process_set: Any,
    ) -> None:
        self.compressor = compressor
        self._arguments = _key(op, predivide, groups, sparse_as_dense, process_set)
        self.names = Names()
        self.engine: HostPipeline | GraphPipeline | None = None
        self._op = op
        self._predivide = predivide
        self._groups = groups
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        key = (process_set.process_set_id, *process_set.ranks)
        self._collectives = Collectives(f"horovod_sparse.{key[0]}.{_made[key]}", process_set)
        _made[key] += 1
        self._agreements = 0
        self._dtypes: dict[str, Any] = {}
        """Of the gradients of all variables that have been seen, by name."""
        self._bucket_of: dict[str, Bucket | GraphBucket] = {}
        self._dense: set[str] = set()
        self._sparse: set[str] = set()
        self._pending_state: Mapping[str, Any] | None = None
        self._function = tf.function(self._reduce, autograph=False)
        self.active = self._activate()
        compressor.bind(self)

    def check_same(self, *, op: Any, predivide: float, groups: Any, sparse_as_dense: bool, process_set: Any) -> None:
        """Raise ValueError unless a later tape is given the same arguments as the first one."""
        given = _key(op, predivide, groups, sparse_as_dense, process_set)
        for name, value in given.items():
            if value != self._arguments[name]:
                raise ValueError(
                    f"{name} must be the same for all tapes with one compression, got {value!r} after "
                    f"{self._arguments[name]!r}; give the other tape a compression of its own, for instance "
                    "copy.deepcopy(compression)"
                )

    def _activate(self) -> bool:
        if not self._process_set.included():
            return False
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            raise RuntimeError(
                "horovod_sparse does not follow an elastic job, in which workers come and go; start the job with a fixed "
                "number of workers, or use hvd.Compression.none"
            )
        if self._process_set.size() > 1 or os.environ.get(_FORCE) == "1":
            return True
        warnings.warn(
            f"horovod_sparse: there is one worker, so nothing is compressed (set {_FORCE}=1 to compress all the same)",
            stacklevel=1,
        )
        return False

    # --- gradients in, reduced gradients out ---

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Variable] | None = None,
        use_generic_names: bool = False,
        *,
        learning_rate: Tensor | None = None,
    ) -> list[Any]:
        """The reduced gradients, in the same order; None stays None, unless the variable had a gradient before.

        Args:
            gradients: dense tensors, `tf.IndexedSlices` or None.
            variables: what they are the gradients of: `tf.Variable`s or Keras variables.
            use_generic_names: not needed: names of collectives never depend on those of tensors here.
            learning_rate: of this step; `lr_in_residual` needs it.

        Raises:
            ValueError: a bucket's variables are not all there; the ranks differ.
        """
        # AutoGraph would rewrite all that is called from here, though it needs no rewriting.
        reduce = tf.autograph.experimental.do_not_convert(self._reduce_list)
        return list(reduce(gradients, variables, learning_rate))

    def _reduce_list(
        self, gradients: Sequence[Any], variables: Sequence[Variable] | None, learning_rate: Tensor | None
    ) -> list[Any]:
        if variables is None or len(variables) != len(gradients):
            raise ValueError("variables must be given, one for each gradient, so that residuals can be told apart")
        names = tuple(self.names.of(variables))
        if self._sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        if not self.active:
            return list(gradients)
        rate = tf.constant(math.nan, tf.float64) if learning_rate is None else tf.cast(learning_rate, tf.float64)
        if learning_rate is None and self.compressor.lr_in_residual:
            raise ValueError(
                "lr_in_residual must be False with a gradient tape or a legacy optimizer, which do not tell the learning rate; "
                "use a Keras 3 optimizer with hvd.DistributedOptimizer"
            )
        self._extend(names, gradients, variables)
        if tf.executing_eagerly():
            return list(self._function(self._agreements, names, list(gradients), rate))
        return self._reduce(self._agreements, names, list(gradients), rate)

    def _reduce(self, plan: int, names: tuple[str, ...], gradients: list[Any], rate: Tensor) -> list[Any]:
        """Build the operations; traced again when another `plan` has buckets for more variables."""
        assert self.engine is not None
        given = {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
        # Those of embeddings go Horovod's own way.
        others = {
            name: hvd.allreduce(gradient, op=self._op, process_set=self._process_set)
            for name, gradient in given.items()
            if name in self._sparse
        }
        reduced = self.engine.reduce(
            Step(
                buckets=self._taking_part(names),
                gradients={name: gradient for name, gradient in given.items() if name in self._bucket_of},
                dense={
                    name: given.get(name, tf.zeros(self.names.shape(name), self._dtypes[name]))
                    for name in names
                    if name in self._dense
                },
                others={name: slices.values for name, slices in others.items()},
                dtypes=self._dtypes,
                rate=rate,
                op=self._op,
                divisor=float(self._process_set.size()) if self._op == mpi_ops.Average else 1.0,
                predivide=self._predivide,
            )
        )
        return [others.get(name, reduced.get(name)) for name in names]

    def _taking_part(self, names: Sequence[str]) -> list[Bucket | GraphBucket]:
        """The buckets of some variables, which must all be there: what was sent for others would be lost."""
        buckets = list({id(b): b for b in (self._bucket_of.get(name) for name in names) if b is not None}.values())
        for bucket in buckets:
            absent = [slot.name for slot in bucket.layout.slots if slot.name not in names]
            if absent:
                raise ValueError(
                    f"variables must be all of those that were first reduced together, but {absent} are not there; give every "
                    "tape or optimizer a compression of its own, or use granularity='layer'"
                )
        return buckets

    # --- planning ---

    def _extend(self, names: Sequence[str], gradients: Sequence[Any], variables: Sequence[Variable]) -> None:
        """Plan for variables that have a gradient for the first time."""
        new = {
            name: gradient
            for name, gradient in zip(names, gradients, strict=True)
            if gradient is not None and name not in self._dtypes
        }
        if not new:
            return
        sparse = [name for name, gradient in new.items() if isinstance(gradient, tf.IndexedSlices)]
        self._agree(new, sparse)
        groups = self._group_numbers(names, variables)
        devices = {name: plain(variable).device for name, variable in zip(names, variables, strict=True)}
        parameters, layouts = [], []
        for name, gradient in new.items():
            self._dtypes[name] = gradient.dtype
            if name in sparse:
                self._sparse.add(name)
                continue
            shape = self.names.shape(name)
            residual = self.compressor.residual_dtype or ("float64" if gradient.dtype == tf.float64 else "float32")
            if self.compressor.leaves_dense(name, math.prod(shape)):
                layouts.append(Layout((Slot(name, 0, math.prod(shape), shape),), residual))
            else:
                kind = devices[name] if self.compressor.graph else "cpu"
                parameters.append(Parameter(name, shape, residual, kind, groups.get(name)))
        self._plan(parameters, layouts, devices)

    def _plan(self, parameters: Sequence[Parameter], layouts: Sequence[Layout], devices: Mapping[str, str]) -> None:
        if self.engine is None:
            make = GraphPipeline if self.compressor.graph else HostPipeline
            self.engine = make(
                self.compressor,
                self._collectives,
                world=self._process_set.size(),
                position=self._process_set.rank(),
                rank=mpi_ops.rank(),
            )
        planned = plan(parameters, self.compressor)
        self.engine.add_buckets(planned, devices.__getitem__)
        self.engine.add_dense(layouts, devices.__getitem__)
        for bucket in self.engine.buckets[len(self.engine.buckets) - len(planned) :]:
            self._bucket_of.update((slot.name, bucket) for slot in bucket.layout.slots)
        for layout in layouts:
            self._dense.add(layout.name)
            size = max(self._dtypes[layout.name].size, 4 if self._dtypes[layout.name] == tf.bfloat16 else 2)
            self.engine.dense_bytes_sent += allreduce_bytes(layout.numel * size, self._process_set.size())
        if self._pending_state is not None:
            self.engine.load_state_dict(renamed(self._pending_state, self._bucket_of))
            self._pending_state = None

    def _group_numbers(self, names: Sequence[str], variables: Sequence[Variable]) -> dict[str, int]:
        if self._groups is None:
            return {}
        if isinstance(self._groups, int):
            parts = np.array_split(np.arange(len(names)), min(self._groups, len(names)))
            return {names[index]: number for number, part in enumerate(parts) for index in part}
        numbers = {name: number for number, group in enumerate(self._groups) for name in self.names.of(group)}
        # Who is in no group is one alone.
        alone = [name for name in names if name not in numbers]
        return numbers | {name: len(self._groups) + number for number, name in enumerate(alone)}

    def _agree(self, new: Mapping[str, Any], sparse: list[str]) -> None:
        parameters: list[object] = [(n, self.names.shape(n), g.dtype.name, n in sparse) for n, g in new.items()]
        mine = {
            "compression": repr(self.compressor),
            "variables": digest(parameters),
            "op": str(self._op),
            "sparse_as_dense": str(self._sparse_as_dense),
        }
        self._agreements += 1
        everyone = self._collectives.gather_json(mine, f"agree.{self._agreements}")
        compare(mine, everyone, mpi_ops.rank())
        check_sparse(sparse, self.compressor, sparse_as_dense=self._sparse_as_dense, rank=mpi_ops.rank())

    # --- statistics and state: see `ServingCompressor` ---

    def stats(self) -> Stats:
        return Stats(0, StepStats((), 0.0), StepStats((), 0.0)) if self.engine is None else self.engine.stats()

    @property
    def residual_bytes(self) -> int:
        return 0 if self.engine is None else self.engine.nbytes

    def state_dict(self) -> dict[str, Any]:
        """The engine's state and the names of the variables with sparse gradients, which have none."""
        if self._pending_state is not None:
            return dict(self._pending_state)
        if self.engine is None:
            return empty_state()
        self.engine.adopt_memory()
        return {**self.engine.state_dict(), "sparse": sorted(self._sparse)}

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        """Load now, or, before the first step, when the buckets are made."""
        if self.engine is not None:
            self.engine.adopt_memory()
            self.engine.load_state_dict(renamed(state, self._bucket_of))
        else:
            self._pending_state = state if state["residuals"] else None

    def rescale(self, factor: float) -> None:
        if self._pending_state is not None:
            for kept in ("residuals", "velocities"):
                for array in self._pending_state[kept].values():
                    array *= factor
        if self.engine is not None:
            self.engine.adopt_memory()
            self.engine.rescale(factor)

    def reset(self) -> None:
        self._pending_state = None
        if self.engine is not None:
            self.engine.adopt_memory()
            self.engine.reset()


def _key(op: Any, predivide: float, groups: Any, sparse_as_dense: bool, process_set: Any) -> dict[str, object]:
    members = [[id(member) for member in group] for group in groups] if isinstance(groups, list) else groups
    return {
        "op": op,
        "gradient_predivide_factor": predivide,
        "groups": members,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set.process_set_id,
    }
