"""Training on uneven data: a rank that has no data left repeats its last batch, with weight zero, until nobody has any."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from horovod_sparse.tensorflow.exchange import gather_json

Batch = TypeVar("Batch")

_NO_DATA = object()
_HAS_DATA, _ENDED, _EMPTY = "has data", "ended", "empty"


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
        for batch in dataset:
            yield batch, tf.constant(1.0)
        return
    name = f"horovod_sparse.{process_set.process_set_id}.joined"
    iterator, last = iter(dataset), cast(Batch, _NO_DATA)
    while True:
        new: Any = next(iterator, _NO_DATA)
        state = _HAS_DATA if new is not _NO_DATA else _EMPTY if last is _NO_DATA else _ENDED
        states = gather_json(state, name, process_set)
        if _HAS_DATA not in states:
            return
        if _EMPTY in states:
            ranks = process_set.ranks or range(len(states))
            empty = [rank for rank, one in zip(ranks, states, strict=True) if one == _EMPTY]
            raise ValueError(
                f"rank {mpi_ops.rank()}: dataset must have at least one batch on every rank, got none on the ranks {empty}; a "
                "rank without data repeats its last batch"
            )
        if state == _HAS_DATA:
            last = new
        yield last, tf.constant(float(state == _HAS_DATA))
