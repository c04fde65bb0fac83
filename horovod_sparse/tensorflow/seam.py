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
from horovod_sparse.core.stock import check_release
from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.names import plain
from horovod_sparse.tensorflow.reducer import Reducer, reducer_of
from horovod_sparse.tensorflow.reduction import Reduction
from horovod_sparse.tensorflow.unseen import watch_optimizers

Function = Callable[..., Any]


@functools.cache
def install() -> None:
    """Replace the functions; a second call does nothing."""
    check_release(horovod.__version__)
    for owner, name, extend in _EXTENSIONS:
        stock = getattr(owner, name)
        setattr(owner, name, functools.wraps(stock)(extend(stock)))


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
        if is_ours and is_keras_3:
            del arguments["keras"]
            return keras_optimizer.make(**arguments)
        if is_ours:
            raise ValueError(
                f"optimizer must be one of Keras 3 with a sparsifier, got {arguments['optimizer']!r}; leave "
                "TF_USE_LEGACY_KERAS unset, or use hvd.DistributedGradientTape"
            )
        if is_keras_3:
            warnings.warn(
                "horovod_sparse: stock Horovod never reduces the gradients of a Keras 3 optimizer, so the workers train apart; "
                "make it with horovod_sparse.tensorflow.keras.DistributedOptimizer, which does, also without compression",
                stacklevel=3,
            )
        return stock(*args, **kwargs)

    return extended


def _join(stock: Function) -> Function:
    def extended(*args: Any, **kwargs: Any) -> Any:
        refuse_join()
        return stock(*args, **kwargs)

    return extended


_TAPE = horovod_tensorflow._DistributedGradientTape
_EXTENSIONS = (
    (horovod_tensorflow, "_make_allreduce_grads_fn", _make_allreduce_grads_fn),
    (_TAPE, "gradient", _gradient),
    (_TAPE, "register_local_source", _register_local_source),
    (_TAPE, "get_local_and_global_gradients", _get_local_and_global_gradients),
    (horovod_keras, "create_distributed_optimizer", _create_distributed_optimizer),
    # All names of `hvd.join` end here, also those that were imported before.
    (horovod_tensorflow.mpi_ops.MPI_LIB, "horovod_join", _join),
)
"""Module or class, name, and what makes the extension."""
