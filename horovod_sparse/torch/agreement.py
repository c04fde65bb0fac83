"""Checks before anything is exchanged: every rank has the same settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.core.agreement import compare, op_name, warn_of_values
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.exchange import gather_json
from horovod_sparse.torch.parameters import check_real, description, sums

_agreed: Counter[tuple[int, ...]] = Counter()
"""How many optimizers have agreed so far, by process set. Each optimizer gets a number, which is part of its collectives'
names. An optimizer that only one rank has made does not count. The key includes the ranks because Horovod gives the number
of a removed set to the next one that is added."""


def agree(
    optimizer: Any,
    compressor: TorchCompressor,
    new: Mapping[Tensor, str],
    known_sparse: Collection[str],
    number: int | None,
) -> tuple[int, set[str]]:
    """Compare settings and the `new` parameters with the other ranks of the optimizer's process set. Blocks.

    Return the optimizer's number in its process set, and which new parameters have sparse gradients on some rank.
    `known_sparse` names parameters that this rank knows to have sparse gradients. `number` is that of the optimizer, or None
    before its first agreement.

    Raises:
        ValueError: on every rank that differs from another one; the message has both values.
        TypeError: on every rank, if a parameter is complex.
    """
    names = optimizer._parameter_names
    mine = {
        **description(compressor, new, optimizer.param_groups),
        "optimizer": "new" if number is None else str(number),
        "op": op_name(optimizer.op, mpi_ops.Average, mpi_ops.Sum),
        "sparse_as_dense": str(bool(optimizer.sparse_as_dense)),
        "groups": [str([names[p] for p in group]) for group in dict.fromkeys(optimizer._p_to_group.values())],
        "backward_passes_per_step": str(optimizer.backward_passes_per_step),
    }
    sparse = [
        name
        for parameter, name in new.items()
        if name in known_sparse or (parameter.grad is not None and parameter.grad.is_sparse)
    ]
    process_set = optimizer.process_set
    key = (process_set.process_set_id, *process_set.ranks)
    # Before the first agreement an optimizer has no number, so the collective's name cannot contain it. The description
    # that is compared does.
    name = f"horovod_sparse.{process_set.process_set_id}.agree"
    everyone = gather_json([mine, sparse, _agreed[key], sums(new)], name, process_set)
    compare(mine, [theirs for theirs, *_ in everyone], mpi_ops.rank())
    values = [theirs for *_, theirs in everyone]
    warn_of_values([*new.values()], values, process_set.rank(), mpi_ops.rank(), "call hvd.broadcast_parameters first")
    check_real(new)
    if number is None:
        number = max(agreed for _, _, agreed, *_ in everyone)
        # The next optimizer gets another one.
        _agreed[key] = number + 1
    return number, {name for _, names, *_ in everyone for name in names}
