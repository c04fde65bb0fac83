"""DiLoCo (https://arxiv.org/abs/2311.08105), a dense baseline of local updates, over Horovod or `torch.distributed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Average = Callable[[dict[str, Tensor]], None]
"""Replaces named tensors by their means over all workers."""


def over_horovod(named: dict[str, Tensor]) -> None:
    import horovod.torch as hvd  # studies of `torch.distributed` do without

    for handle in [hvd.allreduce_async_(one, name=f"diloco.{name}") for name, one in named.items()]:
        hvd.synchronize(handle)


def over_a_group(named: dict[str, Tensor]) -> None:
    for one in named.values():
        dist.all_reduce(one)
        one.div_(dist.get_world_size())


class DiLoCo:
    """Averages how far workers have moved from shared parameters theta after H steps, and steps by Nesterov's momentum.

        Delta = mean(theta - theta_r),  m = mu m + Delta,  theta = theta - alpha (Delta + mu m)

    Args:
        every: H, >= 1.
        outer_lr: alpha; published: 0.7.
        outer_momentum: mu, in [0, 1); published: 0.9.
        average: over the workers.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        every: int,
        outer_lr: float,
        outer_momentum: float,
        average: Average,
    ) -> None:
        self.optimizer, self._every, self._lr, self._momentum = optimizer, every, outer_lr, outer_momentum
        self._average = average
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
            deltas = {name: self._shared[name] - one for name, one in self._names.items()}
            self._average(deltas)
            for name, delta in deltas.items():
                velocity = self._velocity[name]
                velocity.mul_(self._momentum).add_(delta)
                self._shared[name].sub_(delta + self._momentum * velocity, alpha=self._lr)
                self._names[name].copy_(self._shared[name])
        return loss
