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
from .common import everyone_raises


@scenario(*TORCHRUN, cases=local_laws.LAWS)
def local_updates(law: Any, *arguments: Any) -> None:
    make = local_laws.torch_maker(sparse)
    law(local_laws.Workers(ranks.rank(), ranks.size(), ranks.allgather_object, make), *arguments)


@scenario(TORCHRUN_2)
def workers_that_begin_with_other_parameters_all_raise() -> None:
    torch.manual_seed(ranks.rank())
    model = nn.Linear(3, 4)
    local = sparse.LocalUpdates(torch.optim.SGD(model.parameters(), lr=0.1), model, every=1)
    model(torch.ones(1, 3)).sum().backward()
    text = everyone_raises(ValueError, local.step)
    assert "shared parameters" in text, text


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
        ({"compression": sparse.DGC(0.1)}, "compression must have no momentum_correction"),
        ({"compression": sparse.TopK(0.1, lr_in_residual=True)}, "compression must have lr_in_residual=False"),
    ):
        settings = {"optimizer": optimizer, "model": model, **arguments}
        assert text in raised(ValueError, lambda settings=settings: sparse.LocalUpdates(**settings))
    assert "got 'TopK'" in raised(TypeError, lambda: sparse.LocalUpdates(optimizer, model, "TopK"))
