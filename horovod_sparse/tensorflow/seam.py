"""The seam to stock Horovod for TensorFlow: functions of its modules and methods of its classes, replaced in place.

`hvd.DistributedGradientTape` copies the methods of `_DistributedGradientTape` into a new class at each call. The replacements
also take the variables of Keras 3. Keras 3 calls none of the methods that Horovod's optimizers override, so replicas would
silently train apart (see `keras.optimizer`). `horovod.tensorflow.DistributedOptimizer` loses `op` and `groups` of Keras'
optimizers.

Without one of our compressors the functions behave as before, except that optimizers of Keras 3 are distributed too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import horovod
import horovod._keras as horovod_keras
import horovod.tensorflow as horovod_tensorflow
import tensorflow as tf

from horovod_sparse.core.binding import check_kind, refuse_join
from horovod_sparse.core.stock import check_release
from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.names import plain
from horovod_sparse.tensorflow.reduction import Reduction
from horovod_sparse.tensorflow.source import VariableSource, source_of

Function = Callable[..., Any]

_signature = functools.cache(inspect.signature)


@functools.cache
def install() -> None:
    """Replace the functions; a second call does nothing."""
    check_release(horovod.__version__)
    for owner, name, extension in _EXTENSIONS:
        setattr(owner, name, _extended(getattr(owner, name), extension))


def _extended(stock: Function, extension: Function) -> Function:
    @functools.wraps(stock)
    def extended(*args: Any, **kwargs: Any) -> Any:
        return extension(stock, *args, **kwargs)

    return extended


# Each of these gets the stock function and its arguments.


def _make_allreduce_grads_fn(stock: Function, *args: Any, **kwargs: Any) -> Any:
    given = _signature(stock).bind(*args, **kwargs).arguments
    compression = given["compression"]
    check_kind(compression, TensorflowCompressor, "horovod_sparse.tensorflow")
    if not isinstance(compression, TensorflowCompressor):
        return stock(*args, **kwargs)
    if given["name"] != "DistributedGradientTape":
        raise ValueError(
            f"optimizer must be one of Keras 3 with a sparsifier, got {given['name']} of legacy Keras or tf.compat.v1; leave "
            "TF_USE_LEGACY_KERAS unset, or use hvd.DistributedGradientTape"
        )
    # A new tape is made in every step.
    return source_of(compression, Reduction.among(given), shared=True)


def _named(tape: Any, sources: Sequence[Any]) -> list[Any]:
    """Return the `tf.Variable`s of sources. Name the sources before, while they still have their paths."""
    if isinstance(tape._allreduce_grads, VariableSource):
        tape._allreduce_grads.names.of(sources)
    return [plain(source) for source in sources]


def _gradient(stock: Function, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(sources, (list, tuple)):
        return stock(tape, target, _named(tape, sources), *args, **kwargs)
    if not isinstance(tape._allreduce_grads, VariableSource):
        return stock(tape, target, sources, *args, **kwargs)
    return stock(tape, target, _named(tape, [sources]), *args, **kwargs)[0]


def _register_local_source(stock: Function, tape: Any, source: Any) -> None:
    stock(tape, plain(source))


def _get_local_and_global_gradients(
    stock: Function, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    return stock(tape, target, _named(tape, sources), *args, **kwargs)


def _distributed_optimizer(stock: Function, *args: Any, **kwargs: Any) -> Any:
    arguments = _signature(stock).bind(*args, **kwargs).arguments
    if isinstance(arguments["optimizer"], tf.compat.v1.train.Optimizer):
        return stock(*args, **kwargs)
    import horovod.tensorflow.keras as stock_keras

    arguments.pop("use_locking", None)
    return stock_keras.DistributedOptimizer(**arguments)


def _create_distributed_optimizer(stock: Function, *args: Any, **kwargs: Any) -> Any:
    given = _signature(stock).bind(*args, **kwargs)
    given.apply_defaults()
    optimizer = given.arguments["optimizer"]
    # Imported here, because Keras takes seconds to import and a tape does not need it.
    import keras

    from horovod_sparse.tensorflow.keras.optimizer import distributed

    if not hasattr(type(optimizer), "from_config"):
        raise TypeError(f"optimizer must be a Keras optimizer, such as keras.optimizers.SGD(0.1), got {optimizer!r}")
    if isinstance(optimizer, keras.optimizers.Optimizer):
        del given.arguments["keras"]
        return distributed(**given.arguments)
    return stock(*args, **kwargs)


def _join(stock: Function, *args: Any, **kwargs: Any) -> Any:
    refuse_join()
    return stock(*args, **kwargs)


_TAPE = horovod_tensorflow._DistributedGradientTape
_EXTENSIONS = (
    (horovod_tensorflow, "_make_allreduce_grads_fn", _make_allreduce_grads_fn),
    (_TAPE, "gradient", _gradient),
    (_TAPE, "register_local_source", _register_local_source),
    (_TAPE, "get_local_and_global_gradients", _get_local_and_global_gradients),
    (horovod_tensorflow, "DistributedOptimizer", _distributed_optimizer),
    (horovod_keras, "create_distributed_optimizer", _create_distributed_optimizer),
    # All names of `hvd.join` end here, also those that were imported before.
    (horovod_tensorflow.mpi_ops.MPI_LIB, "horovod_join", _join),
)
"""Module or class, name, and the extension."""
