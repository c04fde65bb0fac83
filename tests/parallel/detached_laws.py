"""What detached error feedback must do, with Horovod and with `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from horovod_sparse.torch import LocalUpdates, MomentumCorrection, RandomBlock, TopK

from .common import digest, normals, raised

SHAPES = {"first": (40, 50), "second": (3000,), "small": (30,)}
RATES = (0.1, 0.1, 0.2, 0.05, 0.05, 0.1)


class Bowl(nn.Module):
    """Half the squared distance of its parameters from a point, so that gradients are parameters less that point."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, points: Mapping[str, Tensor]) -> Tensor:
        return sum((getattr(self, name) - point).square().sum() / 2 for name, point in points.items())


Wrap = Callable[[Bowl, Any, Any], tuple[Any, Any]]
"""(model, optimizer, compression) -> the model to call, and the optimizer to step."""


def _points(step: int, rank: int) -> dict[str, Tensor]:
    return {name: torch.from_numpy(normals(shape, step=step, rank=rank)) for name, shape in SHAPES.items()}


def gradients_are_those_of_moved_parameters(wrap: Wrap, rank: int, settings: dict[str, Any]) -> None:
    """The gradient is that at `x - c eta e`, and the block leaves x as it was, bit by bit."""
    bowl = Bowl()
    compression = RandomBlock(0.1, seed=3, warmup=None, **settings)
    model, optimizer = wrap(bowl, torch.optim.SGD(bowl.parameters(), lr=RATES[0]), compression)
    seen: dict[str, Tensor] = {}
    for name, parameter in bowl.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.__setitem__(name, gradient.clone()))
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        unit = 1.0 if compression.in_updates or compression.updates is True else rate
        kept = compression.state_dict()["residuals"] if step else {}
        assert not step or any(residual.any() for residual in kept.values())
        before = digest(bowl.parameters())
        optimizer.zero_grad()
        points = _points(step, rank)
        with compression.detached(optimizer, 0.75):
            model(points).backward()
        assert digest(bowl.parameters()) == before
        for name, parameter in bowl.named_parameters():
            moved = parameter.detach() - 0.75 * unit * kept.get(name, 0.0)
            torch.testing.assert_close(seen[name], moved - points[name], rtol=1e-5, atol=1e-6)
        optimizer.step()


def what_cannot_be_right_is_refused(wrap: Wrap, rank: int) -> None:
    bowl, compression = Bowl(), TopK(0.1, warmup=None)
    inner = torch.optim.SGD(bowl.parameters(), lr=0.1)
    assert "serves no optimizer yet" in raised(RuntimeError, lambda: compression.detached(inner))
    model, optimizer = wrap(bowl, inner, compression)

    def step_in_block() -> None:
        with compression.detached(optimizer):
            model(_points(1, rank)).backward()
            optimizer.step()

    def enter(optimizer: Any, compression: Any, coefficient: float = 0.5) -> None:
        with compression.detached(optimizer, coefficient):
            pass

    step_in_block()  # Nothing waits before the first step.
    assert "call optimizer.step() after the block" in raised(RuntimeError, step_in_block)
    other = torch.optim.SGD([bowl.second], lr=0.1)
    assert "got one without 'first'" in raised(ValueError, lambda: enter(other, compression))
    assert "coefficient must be in" in raised(ValueError, lambda: enter(optimizer, compression, 1.5))
    other_bowl, refused = Bowl(), TopK(0.1, balanced=True, warmup=None)
    _, other = wrap(other_bowl, torch.optim.SGD(other_bowl.parameters(), lr=0.1), refused)
    assert "must be False" in raised(ValueError, lambda: enter(other, refused))
    moving = Bowl()
    alone = torch.optim.SGD(moving.parameters(), lr=0.1)
    local = LocalUpdates(alone, moving, TopK(0.1, warmup=None))
    assert "with LocalUpdates" in raised(RuntimeError, lambda: enter(alone, local.compression))


LAWS: dict[str, tuple[Any, ...]] = {
    "gradients": (gradients_are_those_of_moved_parameters, {}),
    "gradients, lr in residual": (gradients_are_those_of_moved_parameters, {"lr_in_residual": True}),
    "gradients, updates": (gradients_are_those_of_moved_parameters, {"updates": True}),
    "gradients, momentum": (
        gradients_are_those_of_moved_parameters,
        {"momentum": MomentumCorrection(0.9, masking=False), "granularity": "layer"},
    ),
    "refusals": (what_cannot_be_right_is_refused,),
}
