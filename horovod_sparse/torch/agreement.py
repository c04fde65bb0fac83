"""What must hold before anything is exchanged: arguments that a sparse exchange can honour, the same on every rank."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.exchange import gather_json


def check_arguments(op: Any, groups: Any, compressor: TorchCompressor) -> None:
    """Refuse what a sparse exchange cannot honour."""
    if op == mpi_ops.Adasum:
        raise ValueError(
            "op must be hvd.Average or hvd.Sum with a sparsifier, got hvd.Adasum: Adasum weighs whole gradients by the "
            "angle between them, which selected entries do not have; use op=hvd.Average or hvd.Compression.none"
        )
    if op not in (mpi_ops.Average, mpi_ops.Sum):
        raise ValueError(
            f"op must be hvd.Average or hvd.Sum with a sparsifier, got {op!r}: entries that a rank did not select are "
            "unknown, not zero; use hvd.Compression.none"
        )
    if groups is not None and compressor.granularity != "bucket":
        raise ValueError(
            f"groups= makes every group one bucket, but compression has granularity={compressor.granularity!r}; "
            "use granularity='bucket', or leave groups= out"
        )


def check_momentum(groups: Iterable[Mapping[str, Any]], compressor: TorchCompressor) -> None:
    """Refuse momentum twice: before the selection by the compressor, and after the reduction by the optimizer."""
    correction = compressor.momentum_correction
    if correction is None:
        return
    for group in groups:
        if group.get("momentum"):
            raise ValueError(
                f"optimizer must have momentum=0 with {correction!r}, got momentum={group['momentum']}: it would be applied "
                "twice. Use torch.optim.SGD(..., momentum=0), or turn it off in the compression (DGC: momentum=0)"
            )
        if "betas" in group:
            warnings.warn(
                f"horovod_sparse: the optimizer averages gradients (betas={group['betas']}) that {correction!r} has averaged "
                "before; momentum correction is meant for SGD without momentum",
                stacklevel=1,
            )
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
    parameters = [(name, tuple(parameter.shape), str(parameter.dtype)) for parameter, name in new.items()]
    names = optimizer._parameter_names
    groups = [[names[member] for member in group] for group in dict.fromkeys(optimizer._p_to_group.values())]
    mine = {
        "compression": repr(compressor),
        "parameters": f"{len(parameters)} with digest {_digest(parameters)}",
        "op": str(optimizer.op),
        "sparse_as_dense": bool(optimizer.sparse_as_dense),
        "groups": f"{len(groups)} with digest {_digest(groups)}",
    }
    sparse = [
        name
        for parameter, name in new.items()
        if name in known_sparse or (parameter.grad is not None and parameter.grad.is_sparse)
    ]
    everyone = gather_json([mine, sparse], name, optimizer.process_set)
    for position, (theirs, _) in enumerate(everyone):
        different = {key: (mine[key], theirs[key]) for key in mine if mine[key] != theirs[key]}
        if different:
            raise ValueError(
                f"rank {mpi_ops.rank()}: all ranks must run the same model with the same compression, but worker {position} "
                f"of the process set differs (mine, theirs): {different}"
            )
    found = {name for _, names in everyone for name in names}
    if found and compressor.momentum_correction is not None and not optimizer.sparse_as_dense:
        raise ValueError(
            f"rank {mpi_ops.rank()}: sparse_as_dense must be True with {compressor.momentum_correction!r}, since the sparse "
            f"gradients of {sorted(found)} would get no momentum; pass sparse_as_dense=True to hvd.DistributedOptimizer"
        )
    return found


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
