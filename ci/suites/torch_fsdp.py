"""A plugin of pytest for PyTorch's tests of `fully_shard`, on CPUs: models have 2 replicas, between which the exchange is put.

The tests shard over all ranks. Here they shard over half of the ranks, and the exchange averages over the two halves, so
that gradients are the same. Dense, the tests are as they were.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.common_distributed import MultiProcessTestCase

from suites import no_gpu, outcomes

REPLICAS = 2
RANKS = 4
_REGISTERED = "_is_registered"


def _fork(self: MultiProcessTestCase) -> None:
    """Start the ranks of a test. Ranks that are forked have what this module has changed."""
    self._start_processes(torch.multiprocessing.get_context("fork").Process)


def _put_in() -> None:
    from horovod_sparse.torch import TopK, register

    shard = fsdp.fully_shard
    made: list[DeviceMesh] = []

    def mesh() -> DeviceMesh:
        """The mesh of the process, each of which runs one test."""
        if not made:
            made.append(
                init_device_mesh("cpu", (REPLICAS, dist.get_world_size() // REPLICAS), mesh_dim_names=("all", "part"))
            )
        return made[0]

    def begin(module: nn.Module, inputs: Any) -> None:
        """Register a model when it is called first: then its modules are all sharded. The outermost is called first."""
        if getattr(module, _REGISTERED, False):
            return
        for one in module.modules():
            setattr(one, _REGISTERED, True)
        if any(one.requires_grad for one in module.parameters()):
            register(module, TopK(1.0, min_numel=0, warmup=None), replicate=mesh()["all"])
            outcomes.note_use()

    def with_replicas(module: Any, **settings: Any) -> FSDPModule:
        if settings.get("mesh") is not None or dist.get_world_size() % REPLICAS:
            return shard(module, **settings)
        sharded: FSDPModule = shard(module, **{**settings, "mesh": mesh()["part"]})
        module.register_forward_pre_hook(begin, prepend=True)
        return sharded

    # Tests import it from either of these.
    places: tuple[Any, ...] = (fsdp, import_module("torch.distributed._composable.fsdp"))
    for place in places:
        place.fully_shard = with_replicas


torch.accelerator.device_count = lambda: RANKS
torch.cpu.device_count = lambda: RANKS
no_gpu.COUNT = RANKS
MultiProcessTestCase._spawn_processes = _fork  # type: ignore[method-assign]
if outcomes.ours():
    _put_in()
