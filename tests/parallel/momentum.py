"""Scenarios: momentum stays in the optimizer, unless the compressor is given it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from horovod_sparse.torch import DGC, MomentumCorrection, NoOp, SIDCo

from .common import (
    BUCKET_BYTES,
    IN_DDP,
    assert_close,
    assert_identical,
    distributed,
    hvd,
    kept,
    raised,
    small_model,
    train,
    wrap,
)
from .scenario import MPI, MPI_2, PAIR, TORCHRUN, TORCHRUN_2, scenario

SETTINGS: dict[str, tuple[Any, ...]] = {
    "nesterov and decay": ({"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},),
    "heavy ball": ({"momentum": 0.9},),
    "dampening": ({"momentum": 0.9, "dampening": 0.3},),
    "maximize": ({"momentum": 0.8, "weight_decay": 0.1, "maximize": True},),
}


def groups_of(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    """SGD with two groups of parameters. Those of the second have another momentum and learning rate."""
    parameters = list(model.parameters())
    second = {"params": parameters[3:], "momentum": settings["momentum"] / 2, "lr": 0.03}
    return torch.optim.SGD([{"params": parameters[:3]}, second], lr=0.05, **settings)


def buffers_of(optimizer: torch.optim.Optimizer) -> Mapping[Tensor, Tensor]:
    """The velocities that an optimizer holds, by parameter."""
    return {p: one["momentum_buffer"] for p, one in optimizer.state.items() if one.get("momentum_buffer") is not None}


@scenario(*PAIR, TORCHRUN_2, cases=SETTINGS)
def everything_sent_is_the_stock_optimizer(settings: dict[str, Any]) -> None:
    """With two groups, and a schedule of rates and momenta. With Horovod some gradients are missing."""
    models, optimizers = (small_model(), small_model()), []
    for model, compression in zip(models, (None, NoOp(granularity=BUCKET_BYTES)), strict=True):
        called, optimizer = distributed(model, groups_of(model, **settings), compression)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [0.06, 0.03], total_steps=40, base_momentum=0.5, max_momentum=0.9
        )
        for step in range(12):
            shorter = step % 4 == 3 and not IN_DDP
            layers = [*model]
            train(nn.Sequential(*layers[:2], *layers[4:]) if shorter else called, optimizer, [step])
            schedule.step()
        optimizers.append(optimizer)
    assert_close(models[1], models[0])
    assert_identical(models[1])
    expected, found = (buffers_of(optimizer).values() for optimizer in optimizers)
    assert len(found) == 8, "velocities are in the optimizer"
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@scenario(*MPI, *TORCHRUN)
def in_the_compressor_it_is_that_of_the_optimizer_where_everything_is_sent() -> None:
    """At any rate, also for the parameters that are reduced dense; without masking."""
    models, own = (small_model(), small_model()), MomentumCorrection(0.9, masking=False)
    for model, compression in zip(models, (None, NoOp(momentum=own, granularity=BUCKET_BYTES)), strict=True):
        momentum: dict[str, Any] = {} if compression is not None else {"momentum": 0.9}
        called, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.05, **momentum), compression)
        for step in range(15):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 20)
            train(called, optimizer, [step])
    assert_close(models[1], models[0])
    assert_identical(models[1])


@scenario(*PAIR, TORCHRUN_2)
def a_step_that_fails_leaves_velocities_as_they_were() -> None:
    """Bit for bit, masked and not, also those of parameters that are reduced dense."""
    for masking in (True, False):
        model, compression = small_model(), DGC(0.02, momentum=MomentumCorrection(0.9, masking=masking), warmup=None)
        called, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.05), compression)
        train(called, optimizer, range(3))
        before = kept(compression)
        optimizer.zero_grad()
        inputs = torch.full((4, 32), float("inf") if hvd.rank() == 1 else 1.0)
        called(inputs).sum().backward()
        if not IN_DDP:
            optimizer.synchronize()
        assert not all(bool(one.grad.isfinite().all()) for one in model.parameters())
        optimizer.zero_grad()
        assert kept(compression) == before
        train(called, optimizer, range(4, 6))
        assert_identical(model)


@scenario(MPI_2)
def a_checkpoint_of_dense_training_goes_on() -> None:
    """With the optimizer's momentum."""
    model = small_model()
    dense = wrap(model, hvd.Compression.none)
    train(model, dense, range(5))
    again = small_model()
    optimizer = wrap(again, NoOp(granularity=BUCKET_BYTES))
    again.load_state_dict(model.state_dict())
    optimizer.load_state_dict(copy.deepcopy(dense.state_dict()))
    for one, its in ((model, dense), (again, optimizer)):
        train(one, its, range(5, 12))
    assert_close(again, model)


@scenario(MPI_2, TORCHRUN_2)
def it_is_refused_in_both() -> None:
    def make(compression: Any, momentum: float = 0.9) -> Any:
        model = small_model()
        return distributed(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum), compression)[1]

    for compression in (DGC(0.01, momentum=0.5), SIDCo(0.01, momentum=MomentumCorrection(0.5))):
        message = raised(ValueError, lambda one=compression: make(one))
        assert "optimizer must have momentum=0 with MomentumCorrection" in message
        assert "got momentum=0.9" in message and compression.source is None
    make(DGC(0.01))
    # Also when it comes later: with the state of a dense run, or with another group of parameters.
    if not IN_DDP:
        optimizer = make(DGC(0.01, momentum=0.5), 0.0)
        assert "momentum=0" in raised(ValueError, lambda: optimizer.load_state_dict(make(None).state_dict()))
        group = {"params": [nn.Parameter(torch.zeros(300))], "momentum": 0.9}
        assert "momentum=0" in raised(ValueError, lambda: optimizer.add_param_group(group))
