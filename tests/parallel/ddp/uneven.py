"""Scenarios: uneven data with `DistributedDataParallel`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.torch import SIDCo, joined, register

from ..common import small_model
from ..scenario import TORCHRUN, scenario
from . import ranks
from .common import assert_identical, loss_of


@scenario(*TORCHRUN)
def a_rank_without_data_adds_zeros_in_its_group() -> None:
    """Also in a group of its own: the first rank trains alone, and the others together."""
    groups = [dist.new_group([0]), dist.new_group([*range(1, ranks.size())])]
    group = groups[min(ranks.rank(), 1)]
    batches = 3 + ranks.rank()
    steps = [weight for _, weight in joined(range(batches), group)]
    assert steps == [1.0] * batches + [0.0] * ((3 if ranks.rank() == 0 else 2 + ranks.size()) - batches)
    model, compression = DistributedDataParallel(small_model()), SIDCo(0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    register(model, compression, optimizer)
    for step, weight in joined(range(2 + ranks.rank())):
        optimizer.zero_grad()
        (weight * loss_of(model, step)).backward()
        optimizer.step()
        assert_identical(model)
    assert compression.stats().steps == 1 + ranks.size()
