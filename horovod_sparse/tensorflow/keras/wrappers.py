"""Versions of functions of `horovod.tensorflow.keras` that work with Keras 3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import horovod.tensorflow.keras as stock
import keras
from horovod.tensorflow import Average, Compression, global_process_set

from horovod_sparse.tensorflow.keras.optimizer import is_keras_3, make


def DistributedOptimizer(  # noqa: N802  Horovod's name.
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras optimizer reduce its gradients over all workers before it applies them.

    A Keras 3 optimizer becomes distributed itself and is returned, with all its state. Others go to stock Horovod.
    A `keras.optimizers.LossScaleOptimizer` may be inside of it or around it. Models must be compiled with
    `jit_compile=False`, since XLA cannot compile the exchange. Without a GPU this is Keras' default.

    Args:
        optimizer: a plain Keras optimizer. Its clipping and weight decay act after the reduction.
        name: prefix of the operations of a dense reduction.
        device_dense: device for a dense reduction.
        device_sparse: device for a dense reduction.
        compression: one of our compressors, which must not serve another optimizer, or one of `hvd.Compression`.
        sparse_as_dense: whether `tf.IndexedSlices` are reduced as dense tensors.
        gradient_predivide_factor: the part of the average's divisor that is applied before the sum instead of after it.
        op: hvd.Average or hvd.Sum.
        backward_passes_per_step: number of passes whose gradients are summed here before they are reduced and applied.
            `optimizer.iterations` counts passes.
        average_aggregated_gradients: whether that sum is divided by the number of passes.
        num_groups: the older form of `groups`.
        groups: a number of groups, or lists of variables, that are reduced together.
        process_set: the workers that take part.
        scale_local_gradients: whether gradients of local variables are divided by the number of workers. Local variables are
            those given to `optimizer.register_local_var(variable)`; their gradients stay this worker's own.

    Raises:
        ValueError: an argument cannot be honoured; the message says what to do instead.
    """
    # Nothing but the arguments is a local variable yet.
    arguments = dict(locals())
    del arguments["optimizer"], arguments["num_groups"]
    if groups is None and num_groups != 0:
        arguments["groups"] = num_groups
    return make(optimizer, **arguments) if is_keras_3(optimizer) else stock.DistributedOptimizer(optimizer, **arguments)


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    **arguments: Any,
) -> Any:
    """Load a saved Keras model and make its optimizer distributed. The model holds no residuals: see `CheckpointCallback`.

    Args:
        filepath: path of the model.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: as for `keras.models.load_model`.
        compression: as for `DistributedOptimizer`.
        arguments: other arguments of `DistributedOptimizer`.

    Raises:
        ValueError: the model was saved without an optimizer.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if model.optimizer is None:
        raise ValueError(f"filepath must be a model that was saved with its optimizer, got {str(filepath)!r}")
    DistributedOptimizer(model.optimizer, compression=compression, **arguments)
    return model
