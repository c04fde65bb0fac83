"""Scenarios: the momentum of SGD moves before the selection, and training is the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor, nn

from horovod_sparse.torch import DGC, MomentumCorrection, NoOp, SIDCo, TopK

from .common import (
    BUCKET_BYTES,
    IN_DDP,
    assert_close,
    assert_identical,
    digest,
    distributed,
    hvd,
    loss_of,
    raised,
    small_model,
    train,
    wrap,
)
from .scenario import MPI, MPI_2, PAIR, TORCHRUN, TORCHRUN_2, scenario

SETTINGS: dict[str, tuple[Any, ...]] = {
    "nesterov and decay": ({"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},),
    "heavy ball": ({"momentum": 0.9},),
    "decay": ({"momentum": 0.9, "weight_decay": 0.1},),
    "nesterov": ({"momentum": 0.9, "nesterov": True},),
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
    # What the optimizer keeps is the velocity of the weight decay alone.
    assert bool(buffers_of(optimizers[1])) == ("weight_decay" in settings)


@scenario(*MPI, *TORCHRUN)
def it_is_momentum_correction_in_units_of_the_update() -> None:
    models, explicit = (small_model(), small_model()), MomentumCorrection(0.9, masking=False)
    for model, momentum in zip(models, (0.9, 0.0), strict=True):
        settings: dict[str, Any] = {} if momentum else {"momentum": explicit, "lr_in_residual": True}
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
        called, optimizer = distributed(model, sgd, TopK(0.02, granularity=BUCKET_BYTES, **settings))
        for step in range(15):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 20)
            train(called, optimizer, [step])
    assert digest(models[0].parameters()) == digest(models[1].parameters())
    assert_identical(models[0])


@scenario(TORCHRUN_2)
def a_step_that_raises_leaves_the_momentum_in_place() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    called, _ = distributed(model, optimizer, TopK(0.02))
    train(called, optimizer, range(2))
    with optimizer.register_step_pre_hook(Mock(side_effect=RuntimeError("interrupted"))):
        raised(RuntimeError, lambda: train(called, optimizer, [2]))
    assert optimizer.param_groups[0]["momentum"] == 0.9 and optimizer.param_groups[0]["weight_decay"] == 0.1
    train(called, optimizer, range(3, 5))
    assert_identical(model)


@scenario(MPI_2)
def a_checkpoint_of_dense_training_goes_on() -> None:
    """The optimizer's momentum becomes the velocities."""
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


@scenario(MPI_2)
def it_stays_in_the_optimizer_where_it_cannot_move() -> None:
    for compression, momentum in (
        (SIDCo(0.1, momentum=None), 0.9),
        (SIDCo(0.1), 0.0),
        (SIDCo(0.1, residual=False), 0.9),
        (DGC(0.1, momentum=0.0), 0.9),
    ):
        wrap(small_model(), compression, momentum=momentum)
        assert compression.momentum_correction is None and not compression.in_updates
    # Embeddings with sparse gradients have no velocity before the selection.
    embedding = nn.Embedding(100, 8, sparse=True)
    sgd, compression = torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9), TopK(0.1)
    optimizer = distributed(embedding, sgd, compression)[1]
    embedding(torch.tensor([1, 5])).sum().backward()
    optimizer.step()
    assert compression.momentum_correction is None and buffers_of(optimizer)
    own = DGC(0.1)
    wrap(small_model(), own, momentum=0.8)
    assert own.momentum_correction == MomentumCorrection(0.8, masking=True)


@scenario(MPI_2)
def what_it_cannot_honour_is_refused() -> None:
    def make(compression: Any, momentum: float = 0.9, **settings: Any) -> Any:
        model = small_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, **settings)
        return distributed(model, sgd, compression)[1]

    message = raised(ValueError, lambda: make(SIDCo(0.1), dampening=0.5))
    assert message.startswith(
        "dampening must be 0 with momentum='auto', got 0.5; make the compressor with momentum=None"
    )
    message = raised(ValueError, lambda: make(DGC(0.01, momentum=0.5)))
    assert "optimizer must have momentum=0 with MomentumCorrection" in message
    assert "which then takes the optimizer's" in message
    # Also when it comes later: with the state of a dense run, or with another group of parameters.
    optimizer = make(DGC(0.01), 0.0)
    assert "momentum=0" in raised(ValueError, lambda: optimizer.load_state_dict(make(None).state_dict()))
    group = {"params": [nn.Parameter(torch.zeros(300))], "momentum": 0.9}
    assert "momentum=0" in raised(ValueError, lambda: optimizer.add_param_group(group))


class _Joined(nn.Module):
    """The parameters' gradients are parts of one array."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.full((size,), 0.1)) for size in (32, 300)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ torch.cat([*self.parts])[:320].view(32, 10)


@scenario(MPI_2, TORCHRUN_2, cases={"alone": (small_model,), "parts": (_Joined,)})
def gradients_are_reduced_once_before_a_step(make: Any) -> None:
    """A second time they would be taken for new ones. A step may be left out, and gradients may be zeroed in place."""
    # In DDP these have one version for all.
    model = small_model() if IN_DDP else make()
    trained, optimizer = distributed(model, groups_of(model, momentum=0.9), SIDCo(0.05))
    train(trained, optimizer, range(2))
    for zero in (partial(optimizer.zero_grad, set_to_none=False), optimizer.zero_grad):
        loss_of(trained, 2).backward()
        if not IN_DDP:
            optimizer.synchronize()
        zero()
    loss_of(trained, 3).backward()
    if not IN_DDP:
        optimizer.synchronize()
    text = raised(RuntimeError, lambda: (loss_of(trained, 4).backward(), optimizer.step()))
    assert "reduced once before a step" in text, text
    if not IN_DDP:
        # DDP itself cannot go on after an exception in backward.
        model.zero_grad()
        train(trained, optimizer, range(5, 7))
        assert_identical(model)
