"""Scenarios: updates in place of gradients, with `DistributedDataParallel`."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from horovod_sparse.torch import TopK

from ..common import assert_identical, digest, distributed, hvd, loss_of, raised, small_model
from ..scenario import TORCHRUN_2, scenario


class Sometimes(nn.Module):
    """Uses its second layer on rank 0 only, and in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.uses = nn.Linear(32, 64), nn.Linear(64, 64), False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        return (self.second(hidden) if self.uses else hidden)[:, :10]


@scenario(TORCHRUN_2, cases={"copied": (False,), "views": (True,)})
def parameters_that_are_not_used_do_not_move(as_view: bool) -> None:
    torch.manual_seed(1)
    model = Sometimes()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped, optimizer = distributed(
        model, adam, TopK(0.5, warmup=None, min_numel=0), find_unused_parameters=True, gradient_as_bucket_view=as_view
    )
    for step in range(4):
        model.uses = hvd.rank() == 0 and step > 1
        before = digest(model.second.parameters())
        optimizer.zero_grad()
        loss_of(wrapped, step).backward()
        optimizer.step()
        assert (digest(model.second.parameters()) == before) == (step < 2)
        assert_identical(model)


@scenario(TORCHRUN_2)
def accumulated_gradients_are_one_update() -> None:
    results = []
    for passes in (1, 2):
        model = small_model()
        wrapped, optimizer = distributed(model, torch.optim.AdamW(model.parameters(), lr=1e-2), TopK(0.02, warmup=None))
        for step in range(4):
            optimizer.zero_grad()
            if passes == 2:
                with wrapped.no_sync():
                    (loss_of(wrapped, step) / 2).backward()
            (loss_of(wrapped, step) / passes).backward()
            optimizer.step()
        assert_identical(model)
        results.append(digest(model.parameters()))
    assert results[0] == results[1]


@scenario(TORCHRUN_2)
def schedulers_and_step_go_together() -> None:
    """Also a scheduler that was there first. Both replace `step`. A step that passes by the exchange is refused."""
    results = []
    for comes_first in (True, False):
        model = small_model()
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        before = torch.optim.lr_scheduler.StepLR(adam, 2) if comes_first else None
        wrapped, optimizer = distributed(model, adam, TopK(0.02, warmup=None))
        scheduler = before or torch.optim.lr_scheduler.StepLR(adam, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(4):
                optimizer.zero_grad()
                loss_of(wrapped, step).backward()
                optimizer.step()
                scheduler.step()
        assert_identical(model)
        results.append(digest(model.parameters()))
    assert results[0] == results[1]
    del optimizer.step
    assert "register" in raised(RuntimeError, optimizer.step)


@scenario(TORCHRUN_2)
def updates_of_uneven_data() -> None:
    model = small_model()
    wrapped, optimizer = distributed(model, torch.optim.AdamW(model.parameters(), lr=1e-2), TopK(0.02, warmup=None))
    with wrapped.join():
        for step in range(2 + 3 * hvd.rank()):
            optimizer.zero_grad()
            loss_of(wrapped, step).backward()
            optimizer.step()
    assert_identical(model)


@scenario(TORCHRUN_2)
def parameters_that_nobody_would_reduce_are_refused() -> None:
    model = small_model()
    part = torch.optim.AdamW(model[0].parameters())
    assert "all parameters of the model" in raised(ValueError, lambda: distributed(model, part, TopK(0.1, warmup=None)))
    frozen = small_model()
    frozen[0].requires_grad_(False)
    wrapped, optimizer = distributed(frozen, torch.optim.AdamW(frozen.parameters()), TopK(0.1, warmup=None))
    for step in range(2):
        frozen[0].requires_grad_(step == 1)
        loss_of(wrapped, step).backward()
        if step == 0:
            optimizer.step()
    assert "from the first step on" in raised(ValueError, optimizer.step)
