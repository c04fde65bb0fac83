"""A function of `horovod.tensorflow` that works with Keras 3 here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as stock
from horovod.tensorflow import global_process_set

from horovod_sparse.tensorflow.names import plain


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Give all workers the variables' values of `root_rank`, as in stock Horovod, but also for Keras 3 variables.

    For a Keras 3 model pass `model.weights`: `model.variables` also has the states of random generators.
    """
    return stock.broadcast_variables([plain(variable) for variable in variables], root_rank, process_set, inplace)
