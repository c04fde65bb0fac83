"""The communication hook for PyTorch's `DistributedDataParallel`. Needs no Horovod.

The annotations are no strings here: DDP compares those of a hook with its own classes.
"""

from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.core.binding import check_kind, compresses
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.ddp import DDPSource, check_fit
from horovod_sparse.torch.group import Group
from horovod_sparse.torch.mesh import nodes_of
from horovod_sparse.torch.nodes import NodeSource
from horovod_sparse.torch.parameters import check_memory


def comm_hook(state: TorchCompressor, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket of `DistributedDataParallel`, compressed by `state`.

        model = DistributedDataParallel(model)
        model.register_comm_hook(SIDCo(ratio=0.001), comm_hook)

    The ranks are those of the default process group. Parameters are named by numbers, in the order of DDP's first buckets. With
    another group, with `lr_in_residual` or `ahead`, and to load a state before the first step, use `register`.

    Args:
        state: a compressor of this module; each model needs its own.
        bucket: what DDP hands over. Its memory receives the reduced gradients.

    Raises:
        TypeError: `state` is not a compressor of this module, or the model is in FSDP.
        ValueError: the compressor serves another model or optimizer, or needs the optimizer, a parameter has sparse
            gradients, or ranks have different settings or parameters.
        RuntimeError: on every other rank, after the step, if one has given the step up after an exception.
    """
    source = state.source if isinstance(state, TorchCompressor) else None
    if not (isinstance(source, (DDPSource, NodeSource)) and isinstance(bucket, GradBucket)):
        check_kind(state, TorchCompressor, "horovod_sparse.torch", stock=False)
        _check_bucket(bucket)
        check_fit(state, None, {})
        source = DDPSource(state, Group(None, bucket.buffer().device), {})
    return source.reduce(bucket)


def register(
    model: torch.nn.Module,
    compression: TorchCompressor,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    replicate: Any = None,
    mesh: Any = None,
) -> None:
    """Let `compression` reduce the gradients of a model, by the names of its parameters.

        model = DistributedDataParallel(model)
        register(model, SIDCo(ratio=0.001))

        fully_shard(model, mesh=mesh["shard"])
        register(model, SIDCo(ratio=0.001), replicate=mesh["replicate"])

        model = DistributedDataParallel(model)
        register(model, SIDCo(ratio=0.001), mesh=init_device_mesh("cuda", (nodes, workers)))

    Gradients are exchanged while backward goes on. With DDP the ranks are those of its process group, with `fully_shard`
    those of `replicate`. With `mesh` the ranks of a node average gradients dense, and each exchanges a part of them with one
    rank of every other node.

    Args:
        model: whose gradients are reduced. Call this on every rank, before the first step.
        compression: a compressor of this module; each model needs its own.
        optimizer: the model's, which is never changed. `lr_in_residual` and `ahead` take the learning rate from it.
        replicate: with `fully_shard`, the mesh of one dimension, or the process group, of the ranks with the same shard.
        mesh: with DDP, the mesh of two dimensions of its ranks: nodes, and the workers of a node.

    Raises:
        TypeError: `model` is neither in DDP nor sharded by `fully_shard`, `compression` is not a compressor of this module,
            `replicate` is neither mesh nor process group, `mesh` is no mesh, or a parameter has no memory of its own.
        ValueError: the compressor already serves a model or an optimizer, or needs the optimizer; `replicate` or `mesh` does
            not fit the model; FSDP itself exchanges between replicas.
        RuntimeError: the model already has a hook.
    """
    check_kind(compression, TorchCompressor, "horovod_sparse.torch", stock=False)
    if not isinstance(model, DistributedDataParallel):
        # It takes a second to import.
        from horovod_sparse.torch.fsdp import register_sharded

        if mesh is not None:
            raise ValueError(
                f"mesh must be left out unless the model is in DistributedDataParallel, got {mesh} for {type(model)}; with "
                "fully_shard give the mesh of the replicas, replicate=mesh['replicate']"
            )
        register_sharded(model, compression, optimizer, replicate)
        return
    if replicate is not None:
        raise ValueError(
            f"replicate must be left out with DistributedDataParallel, whose process group has all replicas, got {replicate!r}"
        )
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    check_fit(compression, optimizer, names)
    check_memory(names)
    device = next(iter(names)).device
    finds_unused = model.find_unused_parameters and not model.static_graph
    nodes = None if mesh is None else nodes_of(mesh, model.process_group, device)
    if nodes is None or nodes.node.world == 1:
        group = Group(model.process_group, device)
        _take_hook(model, compression)
        DDPSource(compression, group, names, optimizer, finds_unused=finds_unused)
        return
    active = compresses(nodes.replicas.world)
    if active:
        # DDP alone does all that is to be done in one node.
        _take_hook(model, compression)
    NodeSource(compression, nodes, names, optimizer, finds_unused=finds_unused, active=active)


def _take_hook(model: DistributedDataParallel, compression: TorchCompressor) -> None:
    try:
        model.register_comm_hook(compression, comm_hook)
    except RuntimeError as error:
        raise RuntimeError(
            "model must have no communication hook yet, and DistributedDataParallel takes only one; call register once for "
            "each model, or wrap the module in a new DistributedDataParallel to give it another compression"
        ) from error


def _check_bucket(bucket: object) -> None:
    if not isinstance(bucket, GradBucket):
        why = "For a model of fully_shard, call register(model, compression, replicate=mesh['replicate'])"
        if isinstance(bucket, tuple):
            # DDP's other reducer hands over a gradient and its parameter.
            why = (
                "torch._dynamo.config.optimize_ddp='python_reducer' reduces every gradient alone; set it to True, or to "
                "'ddp_optimizer'"
            )
        raise TypeError(f"comm_hook must get the buckets of DistributedDataParallel, got {type(bucket)}. {why}")
