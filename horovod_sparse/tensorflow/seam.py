"""The seam to stock Horovod for TensorFlow: functions of its modules and methods of its classes, replaced in place.

- `horovod.tensorflow._make_allreduce_grads_fn` makes the function that reduces gradients, for tapes and for all optimizers
  except those of Keras 3.
- Three methods of `_DistributedGradientTape`. `hvd.DistributedGradientTape` copies them into a new class at each call. The
  replacements also take the variables of Keras 3.
- `horovod._keras.create_distributed_optimizer`: Keras 3 calls none of the methods that Horovod overrides, so replicas
  would silently train apart (see `keras.optimizer`).
- What `hvd.join` calls, which must not be called with one of our compressors.

Without one of our compressors the functions behave as before, except that a Keras 3 optimizer causes a warning.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import horovod
import horovod._keras as horovod_keras
import horovod.tensorflow as horovod_tensorflow

from horovod_sparse.core.binding import check_kind, refuse_join
from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.names import plain
from horovod_sparse.tensorflow.reducer import Reducer, reducer_of
from horovod_sparse.tensorflow.reduction import Reduction
from horovod_sparse.tensorflow.unseen import watch_optimizers

Function = Callable[..., Any]

_GRADIENT_PARAMETERS = ("self", "target", "sources", "output_gradients", "use_generic_names")
_MAKE_PARAMETERS = (
    "name", "device_dense", "device_sparse", "compression", "sparse_as_dense", "op", "gradient_predivide_factor", "groups",
    "process_set",
)  # fmt: skip
_OPTIMIZER_PARAMETERS = (
    "keras", "optimizer", "name", "device_dense", "device_sparse", "compression", "sparse_as_dense",
    "gradient_predivide_factor", "op", "backward_passes_per_step", "average_aggregated_gradients", "groups", "process_set",
    "scale_local_gradients",
)  # fmt: skip

_replaced: list[tuple[Any, str, Any]] = []
"""(module or class, name, stock function) of every function that is replaced now."""


def check_contract() -> None:
    """Raise ImportError if the functions do not take the parameters that the replacements rely on."""
    problems = []
    for owner, name, expected, _ in _EXTENSIONS:
        function = getattr(owner, name, None)
        found = tuple(inspect.signature(function).parameters) if function is not None else None
        if found != expected:
            problems.append(f"{owner.__name__}.{name} takes {found}, expected {expected}")
    if problems:
        raise ImportError(
            f"horovod_sparse extends horovod.tensorflow as it is in Horovod 0.28.1, but Horovod {horovod.__version__} is "
            f"installed, where {'; '.join(problems)}. Install horovod==0.28.1 (docker/build_horovod.sh builds it)"
        )


def install() -> None:
    """Replace the functions; a second call does nothing."""
    if _replaced:
        return
    check_contract()
    for owner, name, _, extend in _EXTENSIONS:
        stock = getattr(owner, name)
        _replaced.append((owner, name, stock))
        setattr(owner, name, functools.wraps(stock)(extend(stock)))


def uninstall() -> None:
    """Put stock Horovod's functions back. Tapes and optimizers made before are not changed."""
    while _replaced:
        owner, name, stock = _replaced.pop()
        setattr(owner, name, stock)


# Each of these takes the stock function and returns its replacement.


def _make_allreduce_grads_fn(stock: Function) -> Function:
    signature = inspect.signature(stock)

    def extended(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        compression = given["compression"]
        check_kind(compression, TensorflowCompressor, "horovod_sparse.tensorflow")
        if not isinstance(compression, TensorflowCompressor):
            return stock(*args, **kwargs)
        # A new tape is made in every step.
        is_tape = given["name"] == "DistributedGradientTape"
        if is_tape and "keras" in sys.modules:
            watch_optimizers()
        return reducer_of(compression, Reduction.among(given), shared=is_tape)

    return extended


def _named(tape: Any, sources: Sequence[Any]) -> list[Any]:
    """Return the `tf.Variable`s of sources. Name the sources before, while they still have their paths."""
    if isinstance(tape._allreduce_grads, Reducer):
        tape._allreduce_grads.names.of(sources)
    return [plain(source) for source in sources]


def _gradient(stock: Function) -> Function:
    def extended(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(sources, (list, tuple)):
            return stock(self, target, _named(self, sources), *args, **kwargs)
        if not isinstance(self._allreduce_grads, Reducer):
            return stock(self, target, sources, *args, **kwargs)
        return stock(self, target, _named(self, [sources]), *args, **kwargs)[0]

    return extended


def _register_local_source(stock: Function) -> Function:
    def extended(self: Any, source: Any) -> None:
        stock(self, plain(source))

    return extended


def _get_local_and_global_gradients(stock: Function) -> Function:
    def extended(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(self, target, _named(self, sources), *args, **kwargs)

    return extended


def _create_distributed_optimizer(stock: Function) -> Function:
    signature = inspect.signature(stock)

    def extended(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        arguments = given.arguments
        check_kind(arguments["compression"], TensorflowCompressor, "horovod_sparse.tensorflow")
        # Imported here, because Keras takes seconds to import and a tape does not need it.
        import horovod_sparse.tensorflow.keras.optimizer as keras_optimizer

        if not hasattr(type(arguments["optimizer"]), "from_config"):
            raise TypeError(
                f"optimizer must be a Keras optimizer, such as keras.optimizers.SGD(0.1), got {arguments['optimizer']!r}"
            )
        is_ours = isinstance(arguments["compression"], TensorflowCompressor)
        is_keras_3 = keras_optimizer.is_keras_3(arguments["optimizer"])
        if is_ours and not is_keras_3:
            raise ValueError(
                f"optimizer must be one of Keras 3 with a sparsifier, got {arguments['optimizer']!r}; leave "
                "TF_USE_LEGACY_KERAS unset, or use hvd.DistributedGradientTape"
            )
        if not is_keras_3:
            return stock(*args, **kwargs)
        if not is_ours:
            warnings.warn(
                "horovod_sparse: stock Horovod never reduces the gradients of a Keras 3 optimizer, so the workers train apart; "
                "make it with horovod_sparse.tensorflow.keras.DistributedOptimizer, which does, also without compression",
                stacklevel=3,
            )
            return stock(*args, **kwargs)
        del arguments["keras"]
        return keras_optimizer.make(**arguments)

    return extended


def _join(stock: Function) -> Function:
    def extended(*args: Any, **kwargs: Any) -> Any:
        refuse_join("with uneven data iterate over `horovod_sparse.tensorflow.joined(dataset)`")
        return stock(*args, **kwargs)

    return extended


_TAPE = horovod_tensorflow._DistributedGradientTape
_EXTENSIONS = (
    (horovod_tensorflow, "_make_allreduce_grads_fn", _MAKE_PARAMETERS, _make_allreduce_grads_fn),
    (_TAPE, "gradient", _GRADIENT_PARAMETERS, _gradient),
    (_TAPE, "register_local_source", ("self", "source"), _register_local_source),
    (_TAPE, "get_local_and_global_gradients", _GRADIENT_PARAMETERS, _get_local_and_global_gradients),
    (horovod_keras, "create_distributed_optimizer", _OPTIMIZER_PARAMETERS, _create_distributed_optimizer),
    # All names of `hvd.join` end here, also those that were imported before.
    (horovod_tensorflow.mpi_ops.MPI_LIB, "horovod_join", ("name",), _join),
)
"""Module or class, name, the parameters that the extension relies on, and what makes it."""
