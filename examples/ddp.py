"""What the examples need of `torch.distributed`, under the names that Horovod has for it, and the compressors."""

from __future__ import annotations

import atexit
import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse.torch as sparse

rank, size = dist.get_rank, dist.get_world_size


class Compression:
    none = None
    fp16 = staticmethod(fp16_compress_hook)


def __getattr__(name: str) -> Any:
    return getattr(sparse, name)


def init() -> None:
    if "RANK" not in os.environ:
        raise SystemExit(
            "start workers with torchrun: torchrun --nproc-per-node 2 examples/torch_digits.py --transport ddp"
        )
    dist.init_process_group("gloo")
    atexit.register(shutdown)


def shutdown() -> None:
    """Join Gloo's threads, which belong to the group and to every model that uses it: one that outlives Python aborts."""
    gc.collect()
    dist.destroy_process_group()


def wrap(model: nn.Module, compression: Any, optimizer: torch.optim.Optimizer) -> DistributedDataParallel:
    """Give all workers the first one's parameters, and let them reduce gradients. In your own script this is all you need."""
    wrapped = DistributedDataParallel(model)
    if compression is Compression.fp16:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    elif compression is not Compression.none:
        # Only `ahead` and `lr_in_residual` need the optimizer, for its learning rate.
        sparse.register(wrapped, compression, optimizer)
    return wrapped


def allreduce(tensor: Tensor, name: str = "") -> Tensor:
    """Return the mean."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total / size()


def allgather_object(value: Any, name: str = "") -> list[Any]:
    gathered: list[Any] = [None] * size()
    dist.all_gather_object(gathered, value)
    return gathered
