"""Scenarios: updates in place of gradients, with Horovod's optimizer."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import horovod.torch as hvd
import torch
from torch import nn

from horovod_sparse.torch import TopK
from horovod_sparse.torch.routes import OptimizerRoutes

from . import updates_laws
from .common import assert_identical, digest, everyone, loss_of, raised, small_model
from .scenario import EVERYWHERE, MPI_2, scenario


def _wrap(model: nn.Module, optimizer: Any, compression: Any, **arguments: Any) -> tuple[nn.Module, Any]:
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression, **arguments)


@scenario(*EVERYWHERE, cases=updates_laws.LAWS)
def updates_in_place_of_gradients(law: Any, *arguments: Any) -> None:
    law(updates_laws.Workers(hvd.rank(), hvd.size(), everyone, _wrap, True), *arguments)


@scenario(MPI_2)
def stock_habits_make_no_difference_to_updates() -> None:
    """A sum is an average too; synchronize only says that gradients are there; passes are added up; groups may be added."""
    digests = []
    for arguments in ({}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"backward_passes_per_step": 2}):
        model = small_model()
        first, *others = model
        adam = torch.optim.AdamW(nn.Sequential(*others).parameters(), lr=1e-2)
        _, optimizer = _wrap(model, adam, TopK(0.02, warmup=None), **arguments)
        optimizer.add_param_group({"params": [*first.parameters()]})
        passes = arguments.get("backward_passes_per_step", 1)
        for step in range(4):
            optimizer.zero_grad()
            for _ in range(passes):
                (loss_of(model, step) / passes).backward()
            if arguments:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        assert_identical(model)
        digests.append(digest(model.parameters()))
    assert len(set(digests)) == 1
    optimizer.zero_grad()
    for _ in range(2):
        loss_of(model, 4).backward()
    assert "before loss.backward()" in raised(AssertionError, optimizer.zero_grad)
    optimizer.step()


@scenario(MPI_2)
def a_rank_that_raises_before_its_update_is_exchanged_tells_the_others() -> None:
    model = small_model()
    _, optimizer = _wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), TopK(0.02, warmup=None))

    def take(step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()

    for step in range(3):
        take(step)
    if hvd.rank() == 1:
        with patch.object(OptimizerRoutes, "adopt", side_effect=KeyboardInterrupt):
            raised(KeyboardInterrupt, lambda: take(3))
    else:
        assert "another rank has given up a step" in raised(RuntimeError, lambda: take(3))
    take(4)
    assert_identical(model)
