"""Who exchanges the movements of local updates, and what is refused. Imports Horovod only where it is used.

Tested by tests/parallel/local.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.contrib.torch_movement import Movement, in_turns
from horovod_sparse.core.binding import compresses
from horovod_sparse.core.layout import Slot
from horovod_sparse.core.state import empty_state, step_of
from horovod_sparse.core.stock import complete_global_set
from horovod_sparse.core.transport import Transport
from horovod_sparse.exchange.protocols import Reduced
from horovod_sparse.ops.protocol import Moved
from horovod_sparse.torch import stock
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.group import Group
from horovod_sparse.torch.meeting import agree, fail_together
from horovod_sparse.torch.parameters import check_memory, held, is_sharded
from horovod_sparse.torch.source import TensorSource


class MovementSource(TensorSource):
    """What an optimizer has moved. What waits of a parameter that has none is set aside; those that come later get buckets.

    Args:
        compressor: whose movements these are.
        transport: what joins the workers.
        names: those of the parameters, in the order of the model.
        shards: what joins the ranks of this worker, if its parameters are sharded.
    """

    def __init__(
        self, compressor: TorchCompressor, transport: Transport, names: Mapping[Tensor, str], shards: Sequence[Group]
    ) -> None:
        super().__init__(compressor, transport, active=compresses(transport.world))
        self._given, self._shards = names, shards
        self._moved: dict[Tensor, Moved] = {}
        """How far parameters have moved, in the exchange that has begun."""

    @property
    def exchanges(self) -> int:
        """The number of those that buckets have made, also in a state that was loaded before the first."""
        if self.driver.feedback is not None:
            return max((bucket.state.step for bucket in self.driver.feedback.buckets), default=0)
        return step_of(self.driver.deferred or empty_state())

    def exchange(self, movement: Movement, parts: Sequence[Tensor], growth: float) -> None:
        """Move parameters from their start by the mean of what all workers send of how far they have moved, times `growth`."""
        # A rank that holds nothing of what is sharded learns from the others whether the step has failed.
        if not parts and not self._shards:
            return
        self.memory = {part: part.detach() for part in parts}
        try:
            new = {one: name for one, name in self._given.items() if one in self.memory and one not in self.names}
            if new or self.driver.feedback is None:
                agree(self, new, later=self._given.values())
            self.begin()
            # Buckets are packed from the last parameter to the first.
            for part in reversed(parts):
                self._moved[part] = movement.moved(part, growth)
                self.add(part)
            self.add_rest()
        except BaseException:
            # The other workers wait for what this one has not sent.
            self.driver.give_up()
            self.memory, self._moved = {}, {}
            raise

        def write(slots: Sequence[Slot], reduced: Reduced) -> None:
            slot_of = {self.parameters[slot.name]: slot for slot in slots}
            for some in in_turns(slot_of):
                self.write([slot_of[one] for one in some], reduced)
                movement.add_to([one for one in some if one in self._moved])

        try:
            fail_together(self.driver.complete(), self._shards)
            self.memory |= {one: torch.empty_like(one) for one in self.names if one not in self._moved}
            self.driver.finish(write)
        finally:
            self.driver.drop()
            self.memory, self._moved = {}, {}

    @property
    def speaks(self) -> bool:
        return super().speaks and not any(shards.position for shards in self._shards)

    def gradient(self, parameter: Tensor) -> Moved | None:
        return self._moved.get(parameter)

    def scale_with(self, scaler: torch.amp.GradScaler) -> None:
        raise RuntimeError(
            "scale_with must not be called with local updates, because the scaler's gradients stay on their worker: call "
            "scaler.step(local) and scaler.update()"
        )


def check_arguments(optimizer: object, model: object) -> None:
    """Raise TypeError unless the optimizer and the model leave gradients on their worker."""
    kinds = {kind.__module__: kind.__name__ for kind in type(optimizer).__mro__}
    for library, why in (
        (
            "accelerate.",
            "makes no step in some calls; give LocalUpdates the optimizer that you gave to accelerator.prepare",
        ),
        ("torch.distributed.optim", "exchanges parameters itself; give LocalUpdates the optimizer within"),
    ):
        for module, name in kinds.items():
            if module.startswith(library):
                raise TypeError(
                    f"optimizer must be a plain one with local updates, got a {name} of {module}, which {why}"
                )
    if isinstance(model, nn.Module) and not isinstance(optimizer, nn.Module) and not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer must have param_groups, step and zero_grad, got a {type(optimizer).__name__} without"
        )
    if not hasattr(optimizer, "param_groups") or not isinstance(model, nn.Module):
        raise TypeError(
            "optimizer and model must be given in this order, LocalUpdates(optimizer, model, compression), got "
            f"{type(optimizer).__name__} and {type(model).__name__}"
        )
    if hasattr(optimizer, "skip_synchronize"):
        raise TypeError(
            "optimizer must be a plain one with local updates, got one of hvd.DistributedOptimizer, which would average all "
            "gradients; leave hvd.DistributedOptimizer out"
        )
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise TypeError(
            "model must be a plain one with local updates, got one in DistributedDataParallel, which would average all "
            "gradients; leave DistributedDataParallel out: docs/local-updates.md shows how, and docs/libraries.md with "
            "Accelerate, Lightning and Transformers' Trainer"
        )


def check_state(state: Mapping[str, Any], names: Mapping[Tensor, str]) -> None:
    """Raise ValueError if a state is none of local updates, or if its arrays have other shapes than those with `names`."""
    absent = [part for part in ("steps", "lengths", "start", "moved", "decay", "compression") if part not in state]
    if absent:
        raise ValueError(f"state must be what LocalUpdates.state_dict() returned, but it has no {absent}")
    mine = {name: tuple(part.shape) for part, name in names.items()}
    theirs = {name: tuple(value.shape) for name, value in state["start"].items()}
    if theirs and theirs != mine:
        raise ValueError(f"the state's 'start' must have the shapes {mine}, got {theirs}; it is another model's")


def refuse_steps(local: Any, optimizer: Any, steps: Callable[[Any], bool]) -> None:
    """Let an optimizer of PyTorch raise where `local` does not step it, as long as `local` lives."""
    # Optimizers that join several may not have been initialised as one.
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return
    here = weakref.ref(local)

    def check(*_: object) -> None:
        there = here()
        # PyTorch's checkpoints let an optimizer without a state make a step whose rates are 0, which moves nothing.
        if there is not None and not steps(there) and any(group.get("lr") != 0 for group in optimizer.param_groups):
            raise RuntimeError(
                "step of LocalUpdates must be called in place of the optimizer's, which exchanges nothing; call local.step(), "
                "or scaler.step(local)"
            )

    weakref.finalize(local, optimizer.register_step_pre_hook(check).remove)


def names_of(optimizer: Any, model: nn.Module, known: Sequence[str] | None = None) -> dict[Tensor, str]:
    """Return the optimizer's parameters with their names, in the order of the model. They must be those that are `known`."""
    moved = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p in moved}
    if len(names) < len(moved):
        raise ValueError(
            f"optimizer must have parameters of the model only, got {len(moved) - len(names)} others; they would drift apart"
        )
    if known is not None and [*names.values()] != known:
        raise ValueError(
            f"optimizer must have the parameters {known}, with which LocalUpdates was made, got {[*names.values()]}; "
            "make it again after parameters were added"
        )
    return names


def placed(
    model: nn.Module, names: Mapping[Tensor, str], group: Any
) -> tuple[dict[Tensor, Tensor], Transport, Sequence[Group]]:
    """Return the parts of the parameters that are here, what joins the workers, and what joins the ranks of this one."""
    if any(map(is_sharded, names)):
        # They take a second to import.
        from torch.distributed.fsdp import FSDPModule

        from horovod_sparse.torch import fsdp

        if isinstance(model, FSDPModule):
            if group is None:
                raise TypeError(
                    'group must be mesh["replicate"] with a model of fully_shard, got None; give fully_shard mesh["shard"] of '
                    'a mesh with the dimensions ("replicate", "shard")'
                )
            parts, mesh = held(names), fsdp.mesh_of(model, names)
            check_memory({part: names[parameter] for parameter, part in parts.items()})
            device = next(iter(parts.values())).device
            return parts, fsdp.replicas_of(group, mesh, device), fsdp.shards_of(mesh, device)
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            raise TypeError(
                f"model must be one of fully_shard with sharded parameters, got a {type(model).__name__} with such layers; "
                "call fully_shard for the whole model, too, or give LocalUpdates the part that it was called for"
            )
    check_memory(names)
    return held(names), transport_of(group, next(iter(names)).device), ()


def transport_of(group: Any, device: torch.device) -> Transport:
    """Return the collectives of a process set, or of a process group of `torch.distributed`; None for all workers."""
    if isinstance(group, DeviceMesh):
        raise TypeError(
            f"group must be a process group or a process set with a model that is not one of fully_shard, got {group}; leave "
            "it out to exchange between all workers: those of a group of its own train a model of their own"
        )
    with_horovod = stock.module is not None and stock.module.is_initialized()
    if with_horovod and (isinstance(group, stock.module.ProcessSet) or (group is None and not dist.is_initialized())):
        from horovod.common import process_sets
        from horovod.torch import mpi_ops

        from horovod_sparse.torch.exchange import Collectives

        complete_global_set(process_sets, mpi_ops)
        return Collectives(stock.module.global_process_set if group is None else group, "local")
    if not dist.is_initialized():
        raise ValueError(
            "nothing connects the workers yet; call hvd.init() or torch.distributed.init_process_group() first"
        )
    return Group(group, device)
