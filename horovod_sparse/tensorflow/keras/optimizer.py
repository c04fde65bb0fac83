"""Keras 3 optimizers that reduce their gradients before they apply them.

Every update goes through the public `Optimizer.apply`. So a distributed optimizer has its own `apply`, as an attribute of the
instance. Its class stays that of the plain optimizer, and so does what is saved.

Tested by tests/parallel/tf/keras3.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.tensorflow as horovod_tensorflow
import keras
import tensorflow as tf

from horovod_sparse.core.agreement import advice, check_momentum
from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.exchange import make_variable
from horovod_sparse.tensorflow.keras.loss_scaling import follow_scalers, is_scaler, spoiled
from horovod_sparse.tensorflow.names import plain
from horovod_sparse.tensorflow.reduction import Reduction
from horovod_sparse.tensorflow.source import VariableSource, check_compiled, source_of

_INSTEAD = "callback LocalUpdates(compression) with a plain optimizer is its line"

Tensor = Any
Variable = Any

# Both take gradients and their variables.
Reduce = Callable[[list[Any], list[Variable]], list[Any]]
Apply = Callable[[list[Any], list[Variable]], None]


def distributed(
    optimizer: Any,
    *,
    name: str | None,
    compression: Any,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    scale_local_gradients: bool,
    **arguments: Any,
) -> Any:
    """Make a Keras 3 optimizer reduce its gradients over all workers before it applies them, and return it itself.

    It may have a `keras.optimizers.LossScaleOptimizer` inside or around it. The arguments are those of stock Horovod, but
    lists of variables in `groups` matter to a compressor alone.

    Raises:
        ValueError: an argument cannot be honoured; the message says what to do instead.
    """
    reduction = Reduction.among(arguments)
    workers, passes = reduction.process_set, backward_passes_per_step
    # A LossScaleOptimizer calls the distributed `apply` of the optimizer inside of it (`follow_scalers`).
    inner = optimizer.inner_optimizer if is_scaler(optimizer) else optimizer
    _check(inner, passes, reduction)
    if isinstance(compression, TensorflowCompressor):
        groups = [vars(one) for one in (inner, *getattr(inner, "optimizers", ()))]
        check_momentum(compression, groups)
        source = source_of(compression, reduction, shared=False)
        source.advice = advice(type(inner).__name__, groups, _INSTEAD)
        source.steps_made = functools.partial(_steps_made, inner, passes)
        source.settings = functools.partial(_settings_of, inner, source, passes, average_aggregated_gradients)
        reduce: Reduce = functools.partial(_reduce_sparse, source, inner)
    else:
        # Horovod tells the members of lists by name, but Keras variables share a few names ("kernel:0").
        arguments["groups"] = None if isinstance(reduction.groups, list) else reduction.groups
        arguments |= {"name": name or f"Distributed{type(optimizer).__name__}", "compression": compression}
        reduce = functools.partial(_reduce_dense, horovod_tensorflow._make_allreduce_grads_fn(**arguments), workers)
    follow_scalers()
    inner.apply = DistributedApply(
        inner,
        reduce,
        accumulator=_Accumulator(passes) if passes > 1 else None,
        passes_divisor=passes if average_aggregated_gradients else 1,
        local_divisor=workers.size() if scale_local_gradients and workers.included() else 1,
    )
    optimizer.register_local_var = inner.register_local_var = inner.apply.register_local_var
    return optimizer


@dataclass(eq=False)
class DistributedApply:
    """Replaces the `apply` of one optimizer: it reduces the gradients and passes them to the original `apply`."""

    optimizer: Any
    reduce: Reduce
    accumulator: _Accumulator | None
    passes_divisor: int
    local_divisor: int
    """What the gradients of local variables are divided by."""
    local_variables: set[Any] = field(default_factory=set)
    """References to variables whose gradients are not reduced."""
    _begun: bool = False
    _reduced_already: bool = False
    """Whether gradients that have been reduced are being applied, by a LossScaleOptimizer or directly."""

    def __post_init__(self) -> None:
        self._stock_apply = self.optimizer.apply

    def register_local_var(self, var: Variable) -> None:
        """Do not reduce a variable's gradient: keep the one that this rank has computed."""
        self.local_variables.add(plain(var).ref())

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Sequence[Any], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Reduce the gradients and apply them; with several passes per step, only in the last pass."""
        if self._reduced_already:
            self._stock_apply(grads, trainable_variables)
        else:
            self.step(grads, trainable_variables, self.optimizer, self)

    def step(
        self, grads: Sequence[Any], trainable_variables: Sequence[Variable] | None, optimizer: Any, stock_apply: Apply
    ) -> None:
        """Reduce the gradients and apply them with `stock_apply`, which is that of `optimizer`.

        It may be a LossScaleOptimizer around this one. It gets reduced gradients, so it decides on every rank in the same way
        whether the step is left out.
        """

        def apply(gradients: list[Any], variables: list[Variable]) -> None:
            self._reduced_already = True
            try:
                stock_apply(gradients, variables)
            finally:
                self._reduced_already = False

        if trainable_variables is None:
            # Keras has no public way to get the variables that the optimizer was built with.
            trainable_variables = self.optimizer._trainable_variables
        grads, variables = [_as_tensor(one) for one in grads], list(trainable_variables)
        if not grads or len(grads) != len(variables):
            # There is nothing to do, or the optimizer raises its own error.
            apply(grads, variables)
            return
        if not self._begun or not tf.executing_eagerly():
            _check_callers(optimizer)
        self._begun = True
        if self.accumulator is None:
            self._reduce_and_apply(grads, variables, optimizer, apply)
            return
        if not optimizer.built:
            # What is made in a branch of `tf.cond` has no value elsewhere.
            with tf.init_scope():
                optimizer.build(variables)
        sums, is_full = self.accumulator.add(grads, variables)
        # The condition is the same on all ranks, so that all or none of them reach the collectives.
        tf.cond(is_full, lambda: self._apply_sums(sums, variables, optimizer, apply), self._skip)

    def _apply_sums(self, sums: list[Any], variables: list[Variable], optimizer: Any, apply: Apply) -> Tensor:
        assert self.accumulator is not None
        # Clear first. If the reduction raised before that, the passes that follow would never make a step.
        with tf.control_dependencies(self.accumulator.clear()):
            self._reduce_and_apply(sums, variables, optimizer, apply, self.passes_divisor)
        return tf.constant(True)

    def _skip(self) -> Tensor:
        # Count every pass, as stock Horovod does.
        self.optimizer.iterations.assign_add(1)
        return tf.constant(False)

    def _reduce_and_apply(
        self, gradients: list[Any], variables: list[Variable], optimizer: Any, apply: Apply, passes: int = 1
    ) -> None:
        is_local = [plain(variable).ref() in self.local_variables for variable in variables]
        divisors = [passes * (self.local_divisor if local else 1) for local in is_local]
        exchanged = [variable for variable, local in zip(variables, is_local, strict=True) if not local]
        given = [gradient for gradient, local in zip(gradients, is_local, strict=True) if not local]
        if is_scaler(optimizer) and any(is_local):
            given = spoiled(given, [gradient for gradient, local in zip(gradients, is_local, strict=True) if local])
        reduced = iter(self.reduce(given, exchanged))
        found = [gradient if local else next(reduced) for gradient, local in zip(gradients, is_local, strict=True)]
        apply([_divide(*pair) for pair in zip(found, divisors, strict=True)], variables)


def _reduce_dense(
    stock: Callable[..., list[Any]], process_set: Any, gradients: list[Any], variables: list[Variable]
) -> list[Any]:
    """Reduce as stock Horovod does. On workers outside of the process set, gradients stay unchanged."""
    return stock(gradients, [plain(one) for one in variables]) if process_set.included() else gradients


def _reduce_sparse(
    source: VariableSource, optimizer: Any, gradients: list[Any], variables: list[Variable]
) -> list[Any]:
    rate = tf.convert_to_tensor(optimizer.learning_rate) if source.compressor.lr_in_residual else None
    return list(source(gradients, variables, learning_rate=rate))


def _settings_of(optimizer: Any, source: VariableSource, passes: int, average_passes: bool) -> dict[str, str]:
    """Return the settings of an optimizer that must be equal on all ranks to keep replicas equal."""
    settings = {"backward_passes_per_step": str(passes), "average_aggregated_gradients": str(average_passes)}
    if source.compressor.lr_in_residual:
        with tf.init_scope():
            settings["learning_rate"] = repr(float(tf.convert_to_tensor(optimizer.learning_rate)))
    return settings


def _steps_made(optimizer: Any, passes: int) -> int:
    """Return how many steps an optimizer has made. It counts passes."""
    with tf.init_scope():
        return int(optimizer.iterations) // passes


class _Accumulator:
    """Sums of gradients over several backward passes, in variables that are not among the optimizer's."""

    def __init__(self, passes: int) -> None:
        self._passes = passes
        self.count = make_variable(lambda: 0, "passes")
        """Number of passes in the sums."""
        self._sums: dict[Any, Variable] = {}

    def add(self, gradients: list[Any], variables: list[Variable]) -> tuple[list[Any], Tensor]:
        """Add a pass of gradients. Return the sums, None where there has never been one, and whether a step is complete."""
        self.count.assign_add(1)
        sums = [self._add(gradient, plain(variable)) for gradient, variable in zip(gradients, variables, strict=True)]
        return sums, tf.equal(self.count, self._passes)

    def _add(self, gradient: Any, variable: Variable) -> Tensor | None:
        total = self._sums.get(variable.ref())
        if gradient is not None:
            if total is None:
                total = make_variable(functools.partial(tf.zeros, variable.shape, gradient.dtype), "sum")
                self._sums[variable.ref()] = total
            total.assign_add(gradient)
        return None if total is None else total.read_value()

    def clear(self) -> list[Any]:
        """Return operations that set the sums and the count to zero for the next step."""
        return [variable.assign(tf.zeros_like(variable)) for variable in (self.count, *self._sums.values())]


def _as_tensor(gradient: Any) -> Any:
    """Return a gradient as TensorFlow computes it: Keras takes NumPy's arrays as well, and slices with tuples for shapes."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(*map(_as_tensor, (gradient.values, gradient.indices, gradient.dense_shape)))
    return None if gradient is None else tf.convert_to_tensor(gradient)


def _divide(gradient: Any, divisor: float) -> Any:
    if gradient is None or divisor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_divide(gradient.values, divisor), gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(divisor, gradient.dtype)


def _check(optimizer: Any, passes: int, reduction: Reduction) -> None:
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"the Keras backend must be 'tensorflow' with horovod.tensorflow, got {keras.backend.backend()!r}; set "
            "KERAS_BACKEND=tensorflow"
        )
    if isinstance(vars(optimizer).get("apply"), DistributedApply):
        raise ValueError(f"optimizer must be a plain one, but {optimizer.name!r} is distributed already")
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {passes!r}")
    predivide = reduction.gradient_predivide_factor
    if predivide != 1.0 and not reduction.averages:
        raise ValueError(
            f"gradient_predivide_factor must be 1.0 with op=hvd.Sum, got {predivide!r}: it splits an average; use hvd.Average"
        )


def _check_callers(optimizer: Any) -> None:
    """Raise ValueError where a collective would hang or cannot be compiled: neither Keras nor TensorFlow reports it."""
    check_compiled()
    frame = inspect.currentframe()
    while frame is not None:
        # Of a script's own frames none is looked into: Python would keep what their variables hold until they end.
        is_of_keras = frame.f_globals.get("__name__", "").startswith("keras.")
        caller = frame.f_locals.get("self") if is_of_keras else None
        if is_scaler(caller) and caller is not optimizer:
            raise ValueError(
                f"the distributed optimizer {optimizer.name!r} must be directly inside of a LossScaleOptimizer, but another "
                "optimizer is between them: on ranks whose gradients overflow the call would be left out, and the others would "
                "wait; use hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), compression=...)"
            )
        frame = frame.f_back
