"""Scenarios: local updates over `torch.distributed`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import horovod_sparse.torch as sparse

from .. import local_laws
from ..common import raised
from ..scenario import TORCHRUN, TORCHRUN_2, scenario
from . import ranks
from .common import assert_identical, everyone_raises


@scenario(*TORCHRUN, cases=local_laws.LAWS)
def local_updates(law: Any, *arguments: Any) -> None:
    make = local_laws.torch_maker(sparse)
    law(local_laws.Workers(ranks.rank(), ranks.size(), ranks.allgather_object, make), *arguments)


@scenario(TORCHRUN_2)
def a_scaler_belongs_to_its_worker() -> None:
    torch.manual_seed(0)
    model = nn.Linear(30, 40)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    local = sparse.LocalUpdates(optimizer, model, sparse.TopK(0.1, min_numel=0, warmup=None), every=3)
    for step in range(6):
        local.zero_grad()
        loss = model(torch.ones(1, 30)).sum() * (float("inf") if (step, ranks.rank()) == (1, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        local.count_step()
    assert local.compression.stats().steps == 2
    assert_identical(model)
    assert ranks.allgather_object(scaler.get_scale()) == [2.0**10, 2.0**9]
    assert "scaler.step(optimizer)" in raised(RuntimeError, lambda: scaler.step(local))
    assert "scaler.step(optimizer)" in raised(RuntimeError, lambda: local.compression.scale_with(scaler))


@scenario(TORCHRUN_2, cases={"bfloat16": (torch.bfloat16,), "float16": (torch.float16,)})
def half_precision_keeps_what_was_too_small_to_see(dtype: torch.dtype) -> None:
    """Each exchange moves the shared parameters by less than half of a unit of the parameters' type."""
    model = nn.Linear(40, 50, bias=False).to(dtype)
    nn.init.ones_(model.weight)

    class Alternating(torch.optim.Optimizer):
        """Moves the parameters of worker 0 alone, by the smallest step that their type can make."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            model.weight += torch.finfo(dtype).eps * (ranks.rank() == 0)

    local = sparse.LocalUpdates(Alternating(model.parameters(), {}), model, every=1, residual_decay=1.0, outer_lr=0.5)
    for exchanges in range(1, 9):
        local.step()
        expected = torch.tensor(1.0 + exchanges * torch.finfo(dtype).eps / 4).to(dtype)
        assert torch.equal(model.weight, expected.expand(50, 40)), exchanges
    assert_identical(model)


@scenario(TORCHRUN_2)
def parameters_that_one_worker_adds_raise_on_all() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    local = sparse.LocalUpdates(optimizer, model)
    if ranks.rank() == 1:
        optimizer.add_param_group({"params": [model.bias]})
    assert "make it again after parameters were added" in everyone_raises(ValueError, local.synchronize)


@scenario(TORCHRUN_2)
def wrong_settings_are_refused() -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    for arguments, text in (
        ({"every": 0}, "every must be a whole number of steps >= 1, got 0"),
        ({"residual_decay": 0.0}, "residual_decay must be in"),
        ({"outer_lr": float("inf")}, "outer_lr must be a finite number"),
        ({"outer_momentum": 1.0}, "outer_momentum must be in"),
        ({"optimizer": other}, "optimizer must have parameters of the model only, got 1 others"),
        ({"compression": sparse.DGC(0.1, momentum=0.9)}, "compression must have momentum=None"),
        (
            {"compression": sparse.TopK(0.1, lr_in_residual=True, warmup=None)},
            "compression must have lr_in_residual=False",
        ),
        ({"compression": sparse.TopK(0.1, clip=1.0, warmup=None)}, "compression must have clip=None"),
        ({"compression": "TopK"}, "got 'TopK'"),
        ({"optimizer": model, "model": optimizer}, "LocalUpdates(optimizer, model, compression), got Linear and AdamW"),
        ({"model": nn.Sequential(nn.parallel.DistributedDataParallel(model))}, "leave DistributedDataParallel out"),
    ):
        settings = {"optimizer": optimizer, "model": model, **arguments}
        assert text in raised((TypeError, ValueError), lambda settings=settings: sparse.LocalUpdates(**settings))
