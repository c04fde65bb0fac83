"""How the ranks of a process group meet: they agree on parameters, and on a step that fails on some of them. No Horovod.

Tested by tests/parallel/ddp/sharded.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from horovod_sparse.core.agreement import Description, compare
from horovod_sparse.core.step import Step
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.torch.group import Group
from horovod_sparse.torch.parameters import check_real, description
from horovod_sparse.torch.source import TensorSource


def agree(
    source: TensorSource,
    new: Mapping[Tensor, str],
    *,
    more: Description | None = None,
    later: Collection[str] = (),
) -> None:
    """Compare settings, `new` parameters and what `more` describes with the other ranks, and make buckets for these. Blocks."""
    transport = source.driver.transport
    mine = {**description(source.compressor, new, source.param_groups), **(more or {})}
    compare(mine, transport.everyone(mine), transport.rank)
    check_real(new)
    source.extend(new, later=later)


def fail_together(step: Step, shards: Sequence[Group]) -> None:
    """Let a step fail if it does on a rank that holds another part of the same parameters."""
    if shards:
        failed = torch.tensor([int(step.fails)], device=shards[0].device)
        for group in shards:
            failed = group.start(Collective("allreduce", failed))()
        if failed.item():
            step.fail()
