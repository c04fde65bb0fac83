"""Replaces Horovod's reduction of gradients when the compression is one of ours, for both tapes and optimizers.

There is one `VariableSource` per compressor. It takes the place of the function that stock Horovod's `_make_allreduce_grads_fn`
returns. The reduction of a variable is planned when its first gradient is seen, also while a `tf.function` is traced. The
ranks compare their settings then, so that a difference raises on all of them instead of hanging.

Tested by tests/parallel/tf/tape.py.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from horovod_sparse.core.agreement import (
    check_arguments,
    check_sparse,
    compare,
    description,
    is_elastic,
    warn_of_no_state,
)
from horovod_sparse.core.binding import compresses
from horovod_sparse.core.layout import Layout, Parameter
from horovod_sparse.core.plan import planned
from horovod_sparse.core.state import check_state, merged, part_of
from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.exchange import Collectives
from horovod_sparse.tensorflow.host import Given, HostDriver
from horovod_sparse.tensorflow.names import Names, renamed
from horovod_sparse.tensorflow.reduction import Reduction

Tensor = Any
Variable = Any

_agreed: Counter[tuple[int, ...]] = Counter()
"""How many sources have agreed so far, by process set: the number of the next one, on all ranks. One that a single rank has
made does not count. The key includes the ranks because Horovod gives the number of a removed set to the next one."""
_made: Counter[str] = Counter()
"""How many compressors have begun to serve tapes, by their settings."""
_SUSPICIOUS = 10


def check_compiled() -> None:
    """Raise ValueError while a function is traced that XLA compiles: TensorFlow's own message does not say why it cannot."""
    try:
        from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
    except ImportError:
        # The name is TensorFlow's own affair, and its own message is better than none.
        return
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            "jit_compile must be False in tf.function and in Keras' compile(), got True (the default of compile() where there "
            "is a GPU): XLA cannot compile Horovod's collectives; use model.compile(..., jit_compile=False), or compile what "
            "computes gradients, and reduce and apply them outside"
        )


class VariableSource:
    """Reduces lists of gradients. If `shared`, it serves one tape after the other, else one optimizer."""

    def __init__(self, compressor: TensorflowCompressor, reduction: Reduction, *, shared: bool) -> None:
        if is_elastic():
            raise RuntimeError(
                f"compression must be hvd.Compression.none in an elastic job of TensorFlow, got {compressor!r}: residuals do "
                "not follow the workers; start the job without --min-np and --host-discovery-script, or use PyTorch"
            )
        self.reduction = reduction
        self.shared = shared
        self.settings: Callable[[], Mapping[str, str]] = dict
        """Returns the optimizer's settings by name, which must also be equal on all ranks."""
        self.steps_made: Callable[[], int] = lambda: 0
        """Returns how many steps the optimizer has made, as far as it is known."""
        self.advice = ""
        """What the log says of the optimizer."""
        self.compressor = compressor
        self.names = Names()
        self._process_set = reduction.process_set
        self.collectives = Collectives(self._process_set)
        self._agreements = 0
        """Number of agreements with the other ranks so far: one whenever variables join."""
        self._dtypes: dict[str, Any] = {}
        """Variable name -> dtype of its gradient, for all variables that have had a gradient."""
        self.sparse: list[str] = []
        is_member = self._process_set.included()
        self.driver = HostDriver(
            compressor,
            self.collectives,
            # Horovod raises where the process is not in the set.
            world=self._process_set.size() if is_member else 1,
            position=self._process_set.rank() if is_member else 0,
            rank=mpi_ops.rank(),
            averages=reduction.averages,
        )
        # The gradients of embeddings have a different number of rows in every step.
        self._function = tf.function(self._reduce, autograph=False, reduce_retracing=True)
        self.active = is_member and compresses(self._process_set.size())
        compressor.bind(self)

    # --- gradients in, reduced gradients out ---

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Variable] | None = None,
        use_generic_names: bool = False,
        *,
        learning_rate: Tensor | None = None,
    ) -> list[Any]:
        """Return the reduced gradients, in the same order. None stays None, and what waits for that variable waits on.

        `use_generic_names` is ignored: the names of collectives never depend on those of tensors.

        Raises:
            ValueError: the ranks differ, or a variable cannot be reduced.
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
        check_compiled()
        if learning_rate is None and self.compressor.lr_in_residual:
            raise ValueError(
                "lr_in_residual must be False with a gradient tape, which does not tell the learning rate; use a Keras 3 "
                "optimizer with hvd.DistributedOptimizer"
            )
        rate, scale = (
            tf.constant(otherwise, tf.float64) if one is None else tf.cast(one, tf.float64)
            for one, otherwise in ((learning_rate, math.nan), (self.compressor.loss_scale, 1.0))
        )
        self.extend(names, gradients, variables)
        reduce = self._function if tf.executing_eagerly() else self._reduce
        return list(reduce(self._agreements, names, list(gradients), rate, scale))

    def _reduce(
        self, agreements: int, names: tuple[str, ...], gradients: list[Any], rate: Tensor, scale: Tensor
    ) -> list[Any]:
        """Build the operations. They are traced again when new `agreements` give buckets for more variables."""
        given = {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
        if self.driver.feedback is None or not given:
            return gradients
        own = {name: self._slices(name, given.pop(name)) for name in self.sparse if name in given}
        others = {name: self._gather_slices(name, slices) for name, slices in own.items()}
        reduced = self.driver.reduce(
            Given(
                gradients=given,
                own={name: slices.values for name, slices in own.items()},
                others={name: slices.values for name, slices in others.items()},
                dtypes=self._dtypes,
                rate=rate,
                scale=scale,
            )
        )
        return [others.get(name, reduced.get(name)) for name in names]

    def _slices(self, name: str, gradient: Any) -> Any:
        """Return an embedding's gradient as slices, which it may not be in every step."""
        if isinstance(gradient, tf.IndexedSlices):
            return gradient
        return tf.IndexedSlices(gradient, tf.range(self.names.shape(name)[0], dtype=tf.int64))

    def _gather_slices(self, name: str, slices: Any) -> Any:
        """Return the sum of all ranks' slices of an embedding's gradient, each row once.

        Keras' optimizers take slices as they come: of a row that comes twice Adam would add up the squares of its parts, and
        Adafactor may raise.
        """
        number = self.sparse.index(name)
        values, indices = (
            self.collectives.result_in_every_step("allgather", part, f"sparse.{number}.{kind}")
            for part, kind in ((slices.values, "values"), (tf.cast(slices.indices, tf.int64), "indices"))
        )
        divisor = tf.constant(self._process_set.size() if self.reduction.averages else 1, self._dtypes[name])
        # On a GPU sums would not be the same on all ranks to the last bit.
        with tf.device("CPU:0"):
            rows, places = tf.unique(indices)
            sums = tf.math.unsorted_segment_sum(values / divisor, places, tf.size(rows))
        return tf.IndexedSlices(sums, rows, tf.constant(self.names.shape(name), tf.int64))

    # --- planning ---

    def extend(self, names: Sequence[str], gradients: Sequence[Any], variables: Sequence[Variable]) -> None:
        """Plan for variables that have a gradient, of which shape and type are known, for the first time.

        Errors that can occur on one rank alone are found before the ranks compare, so that all of them raise.
        """
        given = {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
        new = {name: gradient for name, gradient in given.items() if name not in self._dtypes}
        if not new:
            return
        sparse = [name for name, gradient in new.items() if isinstance(gradient, tf.IndexedSlices)]
        try:
            layouts = self._lay_out(new, sparse, self.reduction.group_numbers(variables, self.names))
            deferred = self._deferred_for(layouts)
        except Exception as error:
            # Every kind of error is caught: a damaged state raises others than ValueError.
            self._agree([*given], new, sparse, f"{type(error).__name__}: {error}")
            raise
        self._agree([*given], new, sparse, "")
        driver = self.driver
        if driver.feedback is None and driver.deferred is None and self._process_set.rank() == 0:
            warn_of_no_state(self.steps_made())
        driver.extend(layouts, self.advice)
        self.sparse.extend(sparse)
        driver.sparse = self.sparse
        self._dtypes.update({name: gradient.dtype for name, gradient in new.items()})
        if deferred is not None:
            driver.load(merged(driver.known.state_dict(), deferred))

    def _lay_out(self, new: Mapping[str, Any], sparse: Sequence[str], groups: Mapping[str, int]) -> list[Layout]:
        """Return the layouts of the buckets of new variables."""
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
        return planned(parameters, self.compressor, self._process_set.size())

    def _deferred_for(self, layouts: Sequence[Layout]) -> Mapping[str, Any] | None:
        """Return the deferred state by the names that variables have now, after a check of the part for new variables."""
        if self.driver.deferred is None:
            return None
        shapes = {slot.name: slot.shape for layout in layouts for slot in layout.slots}
        deferred = renamed(self.driver.deferred, shapes)
        check_state(part_of(deferred, shapes), self.compressor, shapes)
        return deferred

    def _agree(self, given: Sequence[str], new: Mapping[str, Any], sparse: Sequence[str], problem: str) -> None:
        """Compare settings with the other ranks. This blocks. `problem` is the error that stops this rank, if any.

        `given` are the variables that have a gradient in this step, and `new` those that have their first one.
        """
        key = (self._process_set.process_set_id, *self._process_set.ranks)
        number = _agreed[key] if self._agreements == 0 else self.collectives.number
        mine = description(
            self.compressor,
            [f"{n} {self.names.shape(n)} {g.dtype.name}{' sparse' * (n in sparse)}" for n, g in new.items()],
            problem=problem,
            op=self.reduction.op_name,
            sparse_as_dense=str(self.reduction.sparse_as_dense),
            **self.settings(),
            optimizer=f"number {number} of this process set, its agreement number {self._agreements}",
        )
        everyone = self.collectives.agree(mine, self._first_collective(given))
        compare(mine, everyone, mpi_ops.rank())
        if self._agreements == 0:
            self.collectives.number = number
            _agreed[key] += 1
        self._agreements += 1
        check_sparse(sparse, self.compressor, sparse_as_dense=self.reduction.sparse_as_dense, rank=mpi_ops.rank())

    def _first_collective(self, names: Sequence[str]) -> str | None:
        """Return a collective of a step of these variables; None if no variable is planned yet."""
        for name in names:
            feedback = self.driver.feedback
            if feedback is not None and name in feedback.bucket_of:
                return f"{self.driver.number_of(feedback.bucket_of[name])}.0"
        return next((f"sparse.{number}.values" for number, name in enumerate(self.sparse) if name in names), None)


def source_of(compressor: TensorflowCompressor, reduction: Reduction, *, shared: bool) -> VariableSource:
    """Return the source that a compressor is bound to, or a new one if there is none.

    One compressor serves one optimizer or, if `shared`, tapes that all reduce in the same way.
    """
    check_arguments(reduction.op, mpi_ops.Average, mpi_ops.Sum, mpi_ops.Adasum, reduction.groups, compressor)
    bound = compressor.source
    if not (shared and isinstance(bound, VariableSource) and bound.shared):
        if shared:
            _made[repr(compressor)] += 1
            if compressor.residual and _made[repr(compressor)] == _SUSPICIOUS:
                warnings.warn(
                    f"horovod_sparse: {compressor!r} is number {_SUSPICIOUS} that serves tapes with these settings; if every "
                    "step makes a compressor, its residual is lost: make the compressor once, outside of the step",
                    stacklevel=1,
                )
        return VariableSource(compressor, reduction, shared=shared)
    bound.reduction.check_same(reduction)
    return bound
