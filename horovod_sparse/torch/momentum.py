"""The momentum of PyTorch's SGD, which every worker applies to its own gradients. Never imports Horovod."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from horovod_sparse.ops.protocol import Momentum
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.parameters import local_part

Step = Callable[..., Any]


def is_sgd(step: Step) -> bool:
    """Return whether an optimizer's own step is that of `torch.optim.SGD`, the only one known to be linear in the gradients."""
    return inspect.unwrap(getattr(step, "__func__", step)) is inspect.unwrap(torch.optim.SGD.step)


def moved_momentum(
    compressor: TorchCompressor, optimizer: torch.optim.Optimizer, step: Step, names: Mapping[Tensor, str]
) -> MovedMomentum | None:
    """Let a compressor with `momentum="auto"` apply an optimizer's momentum. Return None if there is nothing to move.

    `step` is the optimizer's own. `names`, the parameters' names, may grow.
    """
    group = next((group for group in optimizer.param_groups if group.get("momentum")), None)
    if compressor.momentum != "auto" or group is None:
        return None
    # Those that are in no model here would have no momentum at all.
    others = any(parameter not in names for one in optimizer.param_groups for parameter in one["params"])
    if others or not compressor.residual or not is_sgd(step):
        compressor.move_momentum(0.0, nesterov=False)
        return None
    compressor.move_momentum(group["momentum"], group["nesterov"])
    return MovedMomentum(optimizer, names)


class MovedMomentum:
    """The momentum that was moved from an optimizer.

    The optimizer keeps `momentum` in its groups, where schedulers change it, but steps without it. The velocity of its weight
    decay, which is the same on all workers, stays in its `momentum_buffer`, as does what a dense training has left there:
    velocities of several origins may be added at any time.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
        self._optimizer = optimizer
        self._names = names
        self._groups: dict[str, int] = {}
        self._seen: set[Tensor] = set()
        """Parameters whose `momentum_buffer` holds more than zeros."""

    def of(self, name: str) -> Momentum:
        """Return the momentum of a parameter in this step."""
        if name not in self._groups:
            numbers = {p: number for number, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
            self._groups = {name: numbers[parameter] for parameter, name in self._names.items() if parameter in numbers}
        group = self._optimizer.param_groups[self._groups[name]]
        return Momentum(group["momentum"], group["momentum"] if group["nesterov"] else None)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Let the optimizer step without momentum in the block. Before, move the parameters by the velocity that it has."""
        found_inf = getattr(self._optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item():
            # The step of a fused optimizer, which a `GradScaler` has told so, will change nothing.
            yield
            return
        groups = [group for group in self._optimizer.param_groups if group["momentum"]]
        kept = [(group["momentum"], group["weight_decay"]) for group in groups]
        try:
            for group in groups:
                self._move(group)
                group["momentum"] = group["weight_decay"] = 0.0
            yield
        finally:
            for group, (momentum, decay) in zip(groups, kept, strict=True):
                group["momentum"], group["weight_decay"] = momentum, decay

    @torch.no_grad()
    def _move(self, group: dict[str, Any]) -> None:
        state, decay = self._optimizer.state, group["weight_decay"]
        with_gradients = [parameter for parameter in group["params"] if parameter.grad is not None]
        parameters = [parameter for parameter in with_gradients if decay or self._holds_velocity(parameter)]
        if not parameters:
            return
        for parameter in parameters:
            if state[parameter].get("momentum_buffer") is None:
                state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        velocities = [state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_mul_(velocities, group["momentum"])
        if decay:
            torch._foreach_add_(velocities, parameters, alpha=decay)
        moves = velocities
        if group["nesterov"]:
            moves = list(torch._foreach_mul(velocities, group["momentum"]))
            if decay:
                torch._foreach_add_(moves, parameters, alpha=decay)
        torch._foreach_add_(parameters, moves, alpha=-float(group["lr"]))

    def _holds_velocity(self, parameter: Tensor) -> bool:
        """Return whether there is a velocity. `hvd.broadcast_optimizer_state` leaves zeros, which are dropped."""
        velocity = self._optimizer.state[parameter].get("momentum_buffer")
        if velocity is None:
            return False
        if parameter not in self._seen and not local_part(velocity).any():
            del self._optimizer.state[parameter]["momentum_buffer"]
            return False
        self._seen.add(parameter)
        return True
