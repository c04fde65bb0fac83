"""Training on uneven data with TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from horovod_sparse.contrib.uneven import Batch, repeated
from horovod_sparse.tensorflow.exchange import gather_json


def joined(
    dataset: Iterable[Batch], process_set: Any = mpi_ops.global_process_set
) -> Iterator[tuple[Batch, tf.Tensor]]:
    """Yield a dataset's batches, each with the weight 1, and the last one again with the weight 0 until all ranks' have ended.

    Multiply the loss by the weight. Then every rank makes the same steps, and a rank whose data has ended adds gradients of
    zero, as with stock `hvd.join()`: averages are over all ranks, and what its residuals hold is still sent. Before each batch
    the ranks exchange a message of some bytes. It blocks.

    Args:
        dataset: this rank's data. It must have at least one batch on every rank, unless it is empty on all.
        process_set: the ranks that train together.

    Raises:
        RuntimeError: it is called while a graph is built.
        ValueError: the dataset is empty on some ranks only. All ranks raise it.
    """
    if not tf.executing_eagerly():
        raise RuntimeError(
            "joined must be iterated eagerly, because it exchanges messages between batches; call the tf.function "
            "within the loop"
        )
    if not process_set.included():
        yield from ((batch, tf.constant(1.0)) for batch in dataset)
        return
    gather = partial(gather_json, name=f"horovod_sparse.{process_set.process_set_id}.joined", process_set=process_set)
    for batch, weight in repeated(dataset, gather, process_set.ranks, mpi_ops.rank()):
        yield batch, tf.constant(weight)
