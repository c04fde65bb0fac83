"""Training on uneven data with PyTorch, over Horovod or `torch.distributed`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from horovod_sparse.contrib.torch_local import transport_of
from horovod_sparse.contrib.uneven import Batch, repeated


def joined(dataset: Iterable[Batch], group: Any = None) -> Iterator[tuple[Batch, float]]:
    """Yield a dataset's batches, each with the weight 1, and the last one again with the weight 0 until all ranks' have ended.

    Multiply the loss by the weight. Then every rank makes the same steps, and a rank whose data has ended adds gradients of
    zero, as with stock `hvd.join()`: averages are over all ranks, and what its residuals hold is still sent. Before each batch
    the ranks exchange a message of some bytes. It blocks.

    Args:
        dataset: this rank's data, such as a `DataLoader`. It must have at least one batch on every rank, unless it is empty on
            all.
        group: a process set of Horovod or a process group of `torch.distributed`, of the ranks that train together; None for
            all workers of the one that was initialised.

    Raises:
        ValueError: on all ranks, if the dataset is empty on some only; or nothing connects the workers yet.
    """
    on_gpu = torch.distributed.is_initialized() and torch.distributed.get_backend(group) == "nccl"
    transport = transport_of(group, torch.device("cuda" if on_gpu else "cpu"))
    yield from repeated(dataset, transport.everyone, None, transport.rank)
