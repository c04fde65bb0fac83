"""What scenarios share: models in `DistributedDataParallel`, gradients given exactly, and what NumPy makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.torch import register

from ..common import batch, digest
from . import ranks

BUCKET_MIB = 0.01
"""Of DDP's buckets. Ours are others."""


class Exact(nn.Module):
    """Its gradients are what it is given."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(tuple(shape))))

    def forward(self, gradients: Mapping[str, np.ndarray]) -> Tensor:
        products = [(getattr(self, name) * torch.from_numpy(one)).sum() for name, one in gradients.items()]
        return torch.stack(products).sum()


def wrap(model: nn.Module, compression: Any = None, **arguments: Any) -> DistributedDataParallel:
    """Put a model into DDP; `arguments` are DDP's."""
    wrapped = DistributedDataParallel(model, **{"bucket_cap_mb": BUCKET_MIB, **arguments})
    if compression is not None:
        register(wrapped, compression, sgd(wrapped, momentum=0.0))
    return wrapped


def reduce(model: DistributedDataParallel, gradients: Any) -> dict[str, np.ndarray]:
    """One step without the update. Return the reduced gradients."""
    model.zero_grad()
    model(gradients).backward()
    return {name: parameter.grad.numpy().copy() for name, parameter in model.module.named_parameters()}


def loss_of(model: nn.Module, step: int) -> Tensor:
    """This rank's loss."""
    inputs, labels = batch(step, ranks.rank(), next(model.parameters()).dtype)
    return F.cross_entropy(model(inputs), labels)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def sgd(model: nn.Module, lr: float = 0.05, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def assert_identical(model: nn.Module) -> None:
    """The parameters are the same on every rank, to the last bit, and finite."""
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    assert len(set(ranks.allgather_object(digest(model.parameters())))) == 1


def everyone_raises(error: type[BaseException], function: Callable[[], object]) -> str:
    """The message of the error that every rank must raise."""
    message = ""
    try:
        function()
    except error as caught:
        message = str(caught)
    assert all(ranks.allgather_object(bool(message))), message
    return message
