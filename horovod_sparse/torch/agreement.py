"""What must hold before anything is exchanged: momentum only once, and the same settings on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse import agreement
from horovod_sparse.agreement import check_sparse, compare
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.exchange import gather_json


def check_momentum(groups: Iterable[Mapping[str, Any]], compressor: TorchCompressor) -> None:
    """Refuse momentum twice, in any of the optimizer's parameter groups."""
    for group in groups:
        betas = group.get("betas")
        agreement.check_momentum(compressor, group.get("momentum"), betas, "torch.optim.SGD(..., momentum=0)")
        if betas is not None:
            # One warning is enough.
            return


def agree(
    optimizer: Any, compressor: TorchCompressor, new: Mapping[Tensor, str], known_sparse: Collection[str], name: str
) -> set[str]:
    """Compare settings and parameters with the other ranks of the optimizer's process set; blocks.

    Args:
        optimizer: the wrapped optimizer.
        compressor: its compression.
        new: the parameters that are about to be planned, and their names.
        known_sparse: names of parameters that this rank knows to have sparse gradients.
        name: of the collective, the same on every rank.

    Returns:
        The names of the new parameters that have a sparse gradient on some rank.

    Raises:
        ValueError: on every rank that finds another one different, with both values.
    """
    parameters = [f"{name} {tuple(parameter.shape)} {parameter.dtype}" for parameter, name in new.items()]
    names = optimizer._parameter_names
    groups = [str([names[member] for member in group]) for group in dict.fromkeys(optimizer._p_to_group.values())]
    mine: dict[str, str | list[str]] = {
        "compression": repr(compressor),
        "parameters": parameters,
        "op": str(optimizer.op),
        "sparse_as_dense": str(bool(optimizer.sparse_as_dense)),
        "groups": groups,
    }
    sparse = [
        name
        for parameter, name in new.items()
        if name in known_sparse or (parameter.grad is not None and parameter.grad.is_sparse)
    ]
    everyone = gather_json([mine, sparse], name, optimizer.process_set)
    compare(mine, [theirs for theirs, _ in everyone], mpi_ops.rank())
    found = {name for _, names in everyone for name in names}
    check_sparse(found, compressor, sparse_as_dense=optimizer.sparse_as_dense, rank=mpi_ops.rank())
    return found


def agree_on_states(problem: str, name: str, process_set: Any) -> None:
    """Raise ValueError on every rank if the state that one of them has loaded does not fit; blocks.

    Args:
        problem: what is wrong with this rank's; "" for nothing.
        name: of the collective, the same on every rank.
        process_set: of the optimizer.
    """
    everyone = gather_json({"problem": problem}, name, process_set)
    compare({"problem": problem}, everyone, mpi_ops.rank())
    if problem:
        raise ValueError(f"rank {mpi_ops.rank()}: the state that was loaded does not fit: {problem}")
