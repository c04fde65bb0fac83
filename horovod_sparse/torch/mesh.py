"""Which ranks are a node, and which have the same part of its gradients: a mesh of two dimensions tells. No Horovod.

Tested by tests/parallel/ddp/nodes.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from horovod_sparse.torch.group import Group


class Replicas(Group):
    """The ranks with one part, of different nodes. Values are told to all ranks of all nodes, since all must do alike."""

    def __init__(self, group: Any, everyone: Group) -> None:
        super().__init__(group, everyone.device)
        self._everyone = everyone

    def everyone(self, value: Any) -> list[Any]:
        return self._everyone.everyone(value)


class Nodes(NamedTuple):
    """The ranks of a mesh, as one of them sees it."""

    replicas: Replicas
    node: Group
    mesh: str
    """Tells the mesh from others."""


def nodes_of(mesh: Any, group: Any, device: torch.device) -> Nodes:
    """Return this rank's place among nodes. Raise if `mesh` is not one of two dimensions of the ranks of a process group."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a DeviceMesh of two dimensions, got {mesh!r}; make it with init_device_mesh({device.type!r}, "
            '(nodes, workers), mesh_dim_names=("replicate", "shard"))'
        )
    if mesh.ndim != 2:
        raise ValueError(
            f"mesh must have two dimensions, nodes and the workers of a node, got {mesh}; make it with init_device_mesh("
            f"{device.type!r}, (nodes, workers))"
        )
    if mesh.device_type != device.type:
        raise ValueError(
            f"mesh must be of the type of the model's device, {device.type!r}, got {mesh}; make it with init_device_mesh("
            f"{device.type!r}, (nodes, workers))"
        )
    ranks, given = sorted(dist.get_process_group_ranks(group)), sorted(mesh.mesh.flatten().tolist())
    if ranks != given:
        raise ValueError(
            f"mesh must have the ranks of the model's process group, {ranks}, got {given}; give DistributedDataParallel the "
            "process group of these ranks, or make a mesh of those"
        )
    everyone = Group(group, device)
    return Nodes(Replicas(mesh.get_group(0), everyone), Group(mesh.get_group(1), device), str(mesh.mesh.tolist()))
