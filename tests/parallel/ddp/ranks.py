"""What a worker needs of `torch.distributed`, under the names that Horovod has for it."""

from __future__ import annotations

import atexit
import gc
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

rank, size = dist.get_rank, dist.get_world_size

DEVICE = os.environ.get("SPARSE_TEST_DEVICE", "cpu")
"""Where models are: "cuda" if `on_gpu` runs the scenarios."""
LIMIT = timedelta(seconds=30)
"""After this time a rank that waits for another one raises."""


def init() -> None:
    if DEVICE == "cuda":
        # NCCL refuses two ranks of one host on one GPU.
        os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    dist.init_process_group("gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl", timeout=LIMIT)
    atexit.register(shutdown)


def shutdown() -> None:
    """Join Gloo's threads, which belong to the group and to every model that uses it: one that outlives Python aborts."""
    # The worker has frozen what scenarios have left.
    gc.unfreeze()
    gc.collect()
    dist.destroy_process_group()


def allgather_object(value: Any, name: str = "", group: Any = None) -> list[Any]:
    """Return every rank's value, in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group)
    return gathered
