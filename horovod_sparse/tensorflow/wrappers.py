"""Functions of `horovod.tensorflow` that work with Keras 3 here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as stock
import tensorflow as tf
from horovod.tensorflow import Average, Compression, global_process_set

from horovod_sparse.tensorflow.names import plain


def DistributedOptimizer(  # noqa: N802  Horovod's name.
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer reduce its gradients over all workers, as in stock Horovod, but also for Keras 3 optimizers.

    Optimizers of `tf.compat.v1.train` go to stock Horovod. All others go to
    `horovod_sparse.tensorflow.keras.DistributedOptimizer` with `op` and `groups`, which stock Horovod loses there.
    """
    # Nothing but the arguments is a local variable yet.
    arguments = dict(locals())
    del arguments["optimizer"], arguments["use_locking"]
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return stock.DistributedOptimizer(optimizer, use_locking=use_locking, **arguments)
    # Imported here, because Keras takes seconds to import.
    from horovod_sparse.tensorflow.keras import optimizer as of_keras

    return of_keras.DistributedOptimizer(optimizer, **arguments)


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Give all workers the variables' values of `root_rank`, as in stock Horovod, but also for Keras 3 variables.

    For a Keras 3 model pass `model.weights`: `model.variables` also has the states of random generators.
    """
    return stock.broadcast_variables([plain(variable) for variable in variables], root_rank, process_set, inplace)
