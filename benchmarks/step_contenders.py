"""What step_time.py times: models, and ways to exchange their gradients. PyTorch only."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse.torch as hvd
from horovod_sparse.torch import stock

if stock.module is None:
    raise SystemExit(f"this needs Horovod ({stock.missing}); without it, torchrun times steps of `horovod-sparse try`")

# --- models ---


@dataclass(frozen=True)
class Task:
    """A model, what it is trained on, and its loss."""

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[nn.Module, Any], Tensor]


def linear(args: argparse.Namespace) -> Task:
    """a chain of square linear layers"""

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))

    def batch(generator: torch.Generator) -> Tensor:
        return torch.randn(args.batch_size, args.width, generator=generator)

    title = f"{args.layers} linear layers of {args.width}, {args.batch_size} samples per worker"
    return Task(title, model, batch, lambda model, x: model(x).square().mean())


class Many(nn.Module):
    """Parameters whose gradients are what the model is called with."""

    def __init__(self, number: int, elements: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(elements)) for _ in range(number)])

    def forward(self, gradients: Tensor) -> Tensor:
        return torch.cat([*self.parts]) @ gradients


def many(args: argparse.Namespace) -> Task:
    """many parameters of one size, whose gradients are random and cost nothing"""

    def batch(generator: torch.Generator) -> Tensor:
        return torch.randn(args.parameters * args.elements, generator=generator)

    title = f"{args.parameters} parameters of {args.elements}"
    return Task(title, partial(Many, args.parameters, args.elements), batch, lambda model, gradients: model(gradients))


MODELS: dict[str, Callable[[argparse.Namespace], Task]] = {"linear": linear, "many": many}

# --- ways to exchange gradients: model, optimizer and a compressor's settings in; model, optimizer and compression out ---

Made = tuple[nn.Module, Any, Any]
Settings = dict[str, Any]


def horovod(compression: Any, model: nn.Module, optimizer: torch.optim.Optimizer, _: Settings) -> Made:
    named = model.named_parameters()
    made = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    return model, made, compression


def sparse(make: Callable[..., Any], model: nn.Module, optimizer: Any, settings: Settings) -> Made:
    # The steps after a warm-up are timed.
    return horovod(make(warmup=None, **settings), model, optimizer, settings)


@cache
def join_gloo() -> None:
    """Have PyTorch's own processes meet, over the network that Horovod's use."""
    first = hvd.rank() == 0
    host = hvd.broadcast_object(socket.gethostname(), root_rank=0, name="gloo_host")
    # Port 0: the system chooses a free one, which the others are told.
    store = dist.TCPStore(host, 0, hvd.size(), is_master=True, wait_for_workers=False) if first else None
    port = hvd.broadcast_object(store.port if store else None, root_rank=0, name="gloo_port")
    store = store or dist.TCPStore(host, port, hvd.size(), is_master=False)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def ddp(hook: str, model: nn.Module, optimizer: Any, _: Settings) -> Made:
    """DistributedDataParallel, with a communication hook if there is one."""
    join_gloo()
    if hook.startswith("PowerSGD"):
        # In one bucket: with several, its callbacks race over Gloo.
        made = DistributedDataParallel(model, bucket_cap_mb=1 << 20)
        rank = int(hook.split()[1])
        state = power_sgd.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        made.register_comm_hook(state, power_sgd.powerSGD_hook)
    else:
        made = DistributedDataParallel(model)
        if hook == "fp16":
            made.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return made, optimizer, None


@cache
def mesh_of(replicas: int) -> DeviceMesh:
    """Ranks that follow each other hold a replica together, as those of a host do."""
    join_gloo()
    return init_device_mesh("cpu", (replicas, hvd.size() // replicas), mesh_dim_names=("replicate", "shard"))


def ddp_sparse(
    make: Callable[..., Any], model: nn.Module, optimizer: Any, settings: Settings, *, nodes: bool = False
) -> Made:
    """DistributedDataParallel with one of our compressors: between all ranks, or between hosts."""
    join_gloo()
    made, compression = DistributedDataParallel(model), make(warmup=None, **settings)
    hvd.register(made, compression, optimizer, mesh=mesh_of(hvd.size() // hvd.local_size()) if nodes else None)
    return made, optimizer, compression


def sharded(
    model: nn.Module,
    optimizer: Any,
    settings: Settings,
    *,
    dimensions: tuple[str, ...] = ("shard",),
    make: Callable[..., Any] | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Made:
    """A model of `fully_shard`: over all dimensions of the mesh, or over its shards, with one of our compressors or without."""
    mesh, policy = mesh_of(hvd.size() // hvd.local_size()), MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    lr, momentum = optimizer.defaults["lr"], optimizer.defaults["momentum"]
    for layer in model.children():
        fully_shard(layer, mesh=mesh[dimensions], mp_policy=policy)
    made: Any = fully_shard(model, mesh=mesh[dimensions], mp_policy=policy)
    # The parameters are others now.
    stepper = torch.optim.SGD(made.parameters(), lr=lr, momentum=momentum)
    if make is None:
        return made, stepper, None
    compression = make(warmup=None, **settings)
    hvd.register(made, compression, stepper, replicate=mesh["replicate"])
    return made, stepper, compression


def adamw(make: Contender, model: nn.Module, optimizer: Any, settings: Settings) -> Made:
    """AdamW in the optimizer's place."""
    return make(model, torch.optim.AdamW(model.parameters(), 1e-4), settings)


def local_updates(
    make: Callable[..., Any], model: nn.Module, optimizer: Any, settings: Settings, *, every: int = 1
) -> Made:
    compression = make(warmup=None, **settings)
    return model, hvd.LocalUpdates(optimizer, model, compression, every=every), compression


ALONE, DENSE = "none: computation alone", "dense fp32"
FSDP_ALONE, ADAMW_ALONE = "FSDP: replicas alone", "AdamW: computation alone"
"""Hosts, or workers, exchange nothing with each other."""
Contender = Callable[[nn.Module, Any, Settings], Made]
_EVERYWHERE = partial(sharded, dimensions=("replicate", "shard"))
SPARSE: dict[str, Contender] = {
    "SIDCo 0.01": partial(sparse, partial(hvd.SIDCo, 0.01)),
    "SIDCo 0.001": partial(sparse, partial(hvd.SIDCo, 0.001)),
    "DDP SIDCo 0.01": partial(ddp_sparse, partial(hvd.SIDCo, 0.01)),
    "DDP SIDCo 0.01 between hosts": partial(ddp_sparse, partial(hvd.SIDCo, 0.01), nodes=True),
    "FSDP SIDCo 0.01": partial(sharded, make=partial(hvd.SIDCo, 0.01)),
    "FSDP SIDCo 0.001": partial(sharded, make=partial(hvd.SIDCo, 0.001)),
    "TopK 0.001": partial(sparse, partial(hvd.TopK, 0.001)),
    "DGC 0.001": partial(sparse, partial(hvd.DGC, 0.001)),
    "GaussianK 0.001": partial(sparse, partial(hvd.GaussianK, 0.001)),
    "MiCRO 0.01": partial(sparse, partial(hvd.MiCRO, 0.01)),
    "RandomBlock 0.01": partial(sparse, partial(hvd.RandomBlock, 0.01)),
    "AdamW, gradients, SIDCo 0.01": partial(adamw, partial(sparse, partial(hvd.SIDCo, 0.01))),
    "AdamW, LocalUpdates, SIDCo 0.01": partial(adamw, partial(local_updates, partial(hvd.SIDCo, 0.01))),
    "AdamW, LocalUpdates, SIDCo 0.01 packed": partial(
        adamw, partial(local_updates, partial(hvd.SIDCo, 0.01, exchange=hvd.Pairs("packed")))
    ),
    "AdamW, LocalUpdates, SIDCo 0.01, every 5": partial(
        adamw, partial(local_updates, partial(hvd.SIDCo, 0.01), every=5)
    ),
}
CONTENDERS: dict[str, Contender] = {
    ALONE: lambda model, optimizer, _: (model, optimizer, None),
    DENSE: partial(horovod, hvd.Compression.none),
    "dense fp16": partial(horovod, hvd.Compression.fp16),
    "DDP fp32": partial(ddp, ""),
    "DDP fp16": partial(ddp, "fp16"),
    "DDP PowerSGD rank 1": partial(ddp, "PowerSGD 1"),
    "DDP PowerSGD rank 4": partial(ddp, "PowerSGD 4"),
    FSDP_ALONE: sharded,
    "FSDP fp32": _EVERYWHERE,
    "FSDP bfloat16": partial(_EVERYWHERE, reduce_dtype=torch.bfloat16),
    ADAMW_ALONE: partial(adamw, lambda model, optimizer, _: (model, optimizer, None)),
    "AdamW, DDP fp32": partial(adamw, partial(ddp, "")),
    "AdamW, DDP fp16": partial(adamw, partial(ddp, "fp16")),
    "AdamW, DDP PowerSGD rank 1": partial(adamw, partial(ddp, "PowerSGD 1")),
    **SPARSE,
}
