"""Reduces the gradients of a model that `fully_shard` has sharded, between the replicas of each shard. No Horovod.

FSDP averages gradients over the ranks that hold one replica of the model together. It leaves a shard of each gradient on each
rank. The ranks that hold the same shard of different replicas exchange it here, while FSDP goes on with its backward pass.

Tested by tests/parallel/ddp/sharded.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate

from horovod_sparse.core.binding import compresses
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.ddp import check_fit
from horovod_sparse.torch.group import Group
from horovod_sparse.torch.meeting import agree, fail_together
from horovod_sparse.torch.parameters import check_memory, follow, held, local_part
from horovod_sparse.torch.source import TensorSource, uncompiled


class Backward:
    """A backward pass, from its first gradient on. PyTorch alone keeps it, and calls it when FSDP has ended the pass."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.arrived: set[Tensor] = set()
        """The parts whose gradients FSDP has reduced."""
        self.taken = 0
        """How many gradients were added to the step, in the order of all ranks."""
        self._end = end

    def __call__(self) -> None:
        self._end()


class ShardedSource(TensorSource):
    """The shards of gradients that this rank holds; `replicas` hold the same ones, and the ranks of `mesh` this replica.

    Gradients are added in the order of the buckets, as soon as they are there. So all ranks start the same exchanges in the
    same order, also if some parameters have no gradient on some ranks.
    """

    def __init__(
        self,
        compressor: TorchCompressor,
        replicas: Group,
        mesh: DeviceMesh,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._parts = held(names)
        self._given = {part: names[parameter] for parameter, part in self._parts.items() if part.numel()}
        place = f"{mesh.get_coordinate()} of {list(mesh.shape)}"
        super().__init__(compressor, replicas, active=compresses(replicas.world), optimizer=optimizer, place=place)
        self._place = place
        self._add, self._end = uncompiled(self._add_arrived), uncompiled(self._end_backward)
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._shards = shards_of(mesh, next(iter(self._parts.values())).device)
        self._backward: Callable[[], Backward | None] = lambda: None
        """The pass that has begun; an exception that ends one leaves none."""
        self._order: list[tuple[Tensor, Tensor]] = []
        """Parameters with their parts, in the order in which their gradients are added; none before the first step."""
        for parameter in names if self.active else ():
            if parameter.is_floating_point():
                # One that is frozen now may be trained alone later, and PyTorch takes no hook for it as long as it is frozen.
                trained = parameter.requires_grad
                # The hooks keep this object alive, as long as the model lives.
                parameter.requires_grad_(True).register_post_accumulate_grad_hook(self.note)  # type: ignore[no-untyped-call]
                parameter.requires_grad_(trained)

    @property
    def speaks(self) -> bool:
        return super().speaks and not any(shards.position for shards in self._shards)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        backward = self._backward()
        return self.memory[parameter] if backward is not None and parameter in backward.arrived else None

    def note(self, parameter: Tensor) -> None:
        """Note that FSDP has reduced a parameter's gradient. With the first one of a backward pass, have its end noticed."""
        backward = self._backward()
        if backward is None:
            backward = Backward(self._end)
            self._backward = ref(backward)
            # FSDP has queued its own end before.
            Variable._execution_engine.queue_callback(backward)
        # Hooks that come after this one may still change this gradient, so it is added when the next one comes.
        self._add(backward)
        backward.arrived.add(self._parts[parameter])

    @torch.no_grad()
    def _add_arrived(self, backward: Backward) -> None:
        """Add the gradients that are there, as far as they are the next ones in the order of all ranks."""
        if not backward.arrived:
            if self.driver.step is not None:
                # An exception has ended the pass before.
                self.give_up()
            follow(self._parts)
        while backward.taken < len(self._order):
            whole, part = self._order[backward.taken]
            gradient = whole.grad
            if part not in backward.arrived or gradient is None:
                break
            self.memory[part] = local_part(gradient)
            self.begin()
            self.add(part)
            backward.taken += 1

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Add the gradients that are left, and reduce all. FSDP has ended its backward pass."""
        backward = self._backward()
        assert backward is not None
        idle: dict[Tensor, Tensor | None] = {}
        for whole, part in self._parts.items():
            if not whole.requires_grad or not part.numel():
                continue
            if part not in backward.arrived:
                idle[whole] = None if whole.grad is None else whole.grad.clone()
            if whole.grad is None:
                whole.grad = torch.zeros_like(whole)
            self.memory[part] = local_part(whole.grad)
        try:
            self._reduce()
        finally:
            self.driver.drop()
            self._backward = lambda: None
            self.memory = {}
        for whole, before in idle.items():
            # As with a dense average, what no replica has used keeps what it had.
            if whole.grad is not None and not local_part(whole.grad).any():
                whole.grad = before

    def _reduce(self) -> None:
        late = [name for part, name in self._given.items() if part in self.memory and part not in self.names]
        if late and self.names:
            raise ValueError(
                f"parameters must require gradients from the first step on, or never, got {late} later; wrap the module anew, "
                "and register it with a new compression"
            )
        if self.driver.feedback is None:
            new = {part: name for part, name in self._given.items() if part in self.memory}
            agree(self, new, more={"shard": self._place, "averages": str(self.averages)})
            # Buckets are packed from the last parameter to the first.
            self._order = [(whole, part) for whole, part in reversed(self._parts.items()) if part in new]
        # Of those that are frozen now, nothing is sent.
        self.memory |= {part: torch.zeros_like(part) for part in self.names if part not in self.memory}
        self.add_rest()
        fail_together(self.driver.complete(), self._shards)
        self.driver.finish(self.write)

    def give_up(self) -> None:
        super().give_up()
        self.memory = {}

    # --- settings ---

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the parts that are here."""
        groups = super().param_groups
        return [{**one, "params": [self._parts[p] for p in one["params"] if p in self._parts]} for one in groups]

    @property
    def averages(self) -> bool:
        """Whether FSDP averages, too. With a factor of the user's own, it divides by that alone."""
        factors = {group.gradient_divide_factor for module in self._modules for group in _parameter_groups(module)}
        if len(factors) > 1:
            raise ValueError(f"set_gradient_divide_factor must be called for all modules alike, got {factors}")
        return factors == {None}


def register_sharded(
    model: nn.Module, compression: TorchCompressor, optimizer: torch.optim.Optimizer | None, replicate: Any
) -> None:
    """Let `compression` reduce the gradients of a model that `fully_shard` has sharded: see `register`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    mesh = mesh_of(model, names)
    replicas = replicas_of(replicate, mesh, local_part(next(iter(names))).device)
    check_memory({local_part(parameter): name for parameter, name in names.items()})
    check_fit(compression, optimizer, names)
    hooks = [hook for one in names for hook in (getattr(one, "_post_accumulate_grad_hooks", None) or {}).values()]
    if any(isinstance(getattr(hook, "__self__", None), ShardedSource) for hook in hooks):
        raise RuntimeError(
            "model must have no compression yet, but register was called for it before; call compression.reset() of the one "
            "that it has to begin anew"
        )
    ShardedSource(compression, replicas, mesh, model, optimizer)


def shards_of(mesh: DeviceMesh, device: torch.device) -> list[Group]:
    """Return the ranks that hold this rank's replica, for each dimension of their mesh."""
    return [Group(group, device) for group in mesh.get_all_groups()]


def replicas_of(replicate: Any, mesh: DeviceMesh, device: torch.device) -> Group:
    """Return the ranks with this rank's shard. Raise if `replicate`, a mesh or a process group, has other ranks."""
    group = replicate
    if isinstance(replicate, DeviceMesh):
        if replicate.ndim != 1:
            raise ValueError(
                f"replicate must be a mesh of one dimension, got {replicate}; pass the dimension of the replicas, such as "
                'mesh["replicate"]'
            )
        group = replicate.get_group()
    elif not isinstance(replicate, dist.ProcessGroup):
        raise TypeError(
            f"replicate must be a mesh of one dimension, or a process group, of the ranks with the same shard, got "
            f'{replicate!r}; pass mesh["replicate"] of a mesh with the dimensions ("replicate", "shard")'
        )
    replicas = Group(group, device)
    ranks = {dist.get_global_rank(replicas.group, position) for position in range(replicas.world)}
    common = ranks.intersection(mesh.mesh.flatten().tolist())
    if len(common) > 1:
        raise ValueError(
            f"replicate must join ranks that hold the same shard of different replicas, but the ranks {sorted(common)} hold "
            'different shards of one; pass mesh["replicate"] of a mesh with the dimensions ("replicate", "shard")'
        )
    return replicas


def mesh_of(model: nn.Module, names: Mapping[Tensor, str]) -> DeviceMesh:
    """Return the mesh over which a model is sharded. Raise if it is not, or if FSDP itself has replicas of it."""
    if not isinstance(model, FSDPModule):
        raise TypeError(
            f"model must be in torch.nn.parallel.DistributedDataParallel, or sharded by fully_shard, got {type(model)}; wrap "
            "it first. FullyShardedDataParallel is not supported: use fully_shard"
        )
    meshes: dict[DeviceMesh, str] = {}
    for parameter, name in names.items():
        mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", ())
        if mesh is None:
            raise ValueError(
                f"parameter {name!r} must be sharded, but is whole on each rank, and nothing averages its gradient over the "
                "shards; call fully_shard for the whole model too, without ignored_params"
            )
        if any(isinstance(one, Replicate) for one in placements):
            raise ValueError(
                f"parameter {name!r} must be sharded along each dimension of its mesh, got {placements} over {mesh}: FSDP "
                "would exchange whole gradients between replicas itself; give fully_shard the mesh of the shards alone, "
                'mesh["shard"], and mesh["replicate"] to register'
            )
        meshes[mesh] = name
    if len(meshes) != 1:
        raise ValueError(
            f"parameters must all be sharded over one mesh, got several: {[*meshes.values()]} are over different ones; use "
            "one mesh for all modules"
        )
    return next(iter(meshes))


def _parameter_groups(module: FSDPModule) -> list[Any]:
    """Return what FSDP knows of the parameters of a module, for which it has no public way."""
    state: Any = module._get_fsdp_state()
    # Releases before 2.13 have one for each module.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]
