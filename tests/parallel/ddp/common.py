"""What scenarios share: models in `DistributedDataParallel`, gradients given exactly, and what NumPy makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..common import distributed, loss_of


class Exact(nn.Module):
    """Its gradients are what it is given."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(tuple(shape))))

    def forward(self, gradients: Mapping[str, np.ndarray]) -> Tensor:
        products = [(getattr(self, name) * torch.from_numpy(one)).sum() for name, one in gradients.items()]
        return torch.stack(products).sum()


def wrap(model: nn.Module, compression: Any = None, **arguments: Any) -> Any:
    """Put a model into DDP; `arguments` are DDP's."""
    return distributed(model, sgd(model, momentum=0.0), compression, **arguments)[0]


def reduce(model: Any, gradients: Any) -> dict[str, np.ndarray]:
    """One step without the update. Return the reduced gradients."""
    model.zero_grad()
    model(gradients).backward()
    return {name: parameter.grad.numpy().copy() for name, parameter in model.module.named_parameters()}


def train_in_passes(model: Any, optimizer: Any, passes: int) -> None:
    """Four steps. Each adds up the gradients of so many backward passes."""
    for step in range(4):
        optimizer.zero_grad()
        for left in reversed(range(passes)):
            is_ddp = isinstance(model, DistributedDataParallel)
            if not is_ddp:
                model.set_requires_gradient_sync(not left)
            with model.no_sync() if left and is_ddp else nullcontext():
                (loss_of(model, step) / passes).backward()
        optimizer.step()


def sgd(model: nn.Module, lr: float = 0.05, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)
