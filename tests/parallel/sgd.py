"""What scenarios of the optimizer's momentum share: settings of SGD, and trainings. Imports no Horovod."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

SETTINGS: dict[str, tuple[Any, ...]] = {
    "nesterov and decay": ({"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},),
    "heavy ball": ({"momentum": 0.9},),
    "decay": ({"momentum": 0.9, "weight_decay": 0.1},),
    "nesterov": ({"momentum": 0.9, "nesterov": True},),
    "maximize": ({"momentum": 0.8, "weight_decay": 0.1, "maximize": True},),
}

Make = Callable[[nn.Module, torch.optim.Optimizer, Any], tuple[nn.Module, Any]]
"""Makes the training of a model with an optimizer distributed. Returns the model to call and the optimizer to step."""


def groups_of(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    """SGD with two groups of parameters. Those of the second have another momentum and learning rate."""
    parameters = list(model.parameters())
    second = {"params": parameters[3:], "momentum": settings["momentum"] / 2, "lr": 0.03}
    return torch.optim.SGD([{"params": parameters[:3]}, second], lr=0.05, **settings)


class Training:
    """One of two trainings that are to be the same."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, compression: Any, make: Make) -> None:
        self.model = model
        self._called, self.optimizer = make(model, optimizer, compression)
        # Changes learning rates and momenta in every step.
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, [0.06, 0.03], total_steps=40, base_momentum=0.5, max_momentum=0.9
        )

    def step(self, loss: Callable[[nn.Module], Tensor]) -> None:
        self.optimizer.zero_grad()
        loss(self._called).backward()
        self.optimizer.step()
        self._schedule.step()


def buffers_of(optimizer: torch.optim.Optimizer) -> Mapping[Tensor, Tensor]:
    """The velocities that an optimizer holds, by parameter."""
    return {p: one["momentum_buffer"] for p, one in optimizer.state.items() if one.get("momentum_buffer") is not None}
