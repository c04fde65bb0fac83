"""DiLoCo (https://arxiv.org/abs/2311.08105), a dense baseline of local updates, over Horovod. PyTorch only."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch import nn


class DiLoCo:
    """Averages how far workers have moved from shared parameters theta after H steps, and steps by Nesterov's momentum.

        Delta = mean(theta - theta_r),  m = mu m + Delta,  theta = theta - alpha (Delta + mu m)

    Args:
        every: H, >= 1.
        outer_lr: alpha; published: 0.7.
        outer_momentum: mu, in [0, 1); published: 0.9.
    """

    compression = hvd.Compression.none

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, *, every: int, outer_lr: float, outer_momentum: float
    ) -> None:
        self.optimizer, self._every, self._lr, self._momentum = optimizer, every, outer_lr, outer_momentum
        self.param_groups = optimizer.param_groups
        self._names = dict(model.named_parameters())
        self._shared = {name: one.detach().clone() for name, one in self._names.items()}
        self._velocity = {name: torch.zeros_like(one) for name, one in self._shared.items()}
        self._steps = 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> Any:
        loss = self.optimizer.step()
        self._steps += 1
        if self._steps % self._every == 0:
            handles = {
                name: hvd.allreduce_async(self._shared[name] - one, name=f"diloco.{name}")
                for name, one in self._names.items()
            }
            for name, handle in handles.items():
                delta, velocity = hvd.synchronize(handle), self._velocity[name]
                velocity.mul_(self._momentum).add_(delta)
                self._shared[name].sub_(delta + self._momentum * velocity, alpha=self._lr)
                self._names[name].copy_(self._shared[name])
        return loss
