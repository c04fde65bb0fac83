"""Programs: what a user does to the gradients after they were averaged, and gradients that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..common import hvd
from .table import BOTH, Way, net, program, sgd

Change = Callable[[nn.Module, int], object]


def _each(change: Callable[[Tensor], object]) -> Change:
    def changed(module: nn.Module, step: int) -> None:
        for parameter in module.parameters():
            assert parameter.grad is not None
            change(parameter.grad)

    return changed


def _noise(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    _each(lambda gradient: gradient.add_(torch.randn(gradient.shape, generator=generator), alpha=0.01))(module, step)


def _replace(module: nn.Module, step: int) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.sign() * 0.01


def _drop(module: nn.Module, step: int) -> None:
    """An optimizer leaves out what has no gradient."""
    next(module.parameters()).grad = None


_CHANGES: dict[str, tuple[Change]] = {
    "clipped-norm": (lambda module, step: nn.utils.clip_grad_norm_(module.parameters(), 0.2),),
    "clipped-value": (lambda module, step: nn.utils.clip_grad_value_(module.parameters(), 0.01),),
    "noised": (_noise,),
    "zeroed": (_each(lambda gradient: gradient.flatten()[::2].zero_()),),
    "centred": (_each(lambda gradient: gradient.sub_(gradient.mean(-1, keepdim=True))),),
    "scaled": (_each(lambda gradient: gradient.div_(gradient.norm() + 1.0)),),
    "decayed": (
        lambda module, step: [p.grad.add_(p.detach(), alpha=0.01) for p in module.parameters() if p.grad is not None],
    ),
    "replaced": (_replace,),
    "dropped": (_drop,),
}
_QUICK = {"clipped-norm"}


@program(BOTH, cases=_CHANGES, quick=_QUICK)
def gradients_changed(way: Way, change: Change) -> nn.Module:
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(8):
        optimizer.zero_grad()
        way.loss(model, step).backward()
        with way.reduced(optimizer):
            change(module, step)
            optimizer.step()
    return module


@program(BOTH, cases={"kept": (False,), "none": (True,)})
def gradients_zeroed_after_the_step(way: Way, none: bool) -> nn.Module:
    """By the model, or by hand, in place of the optimizer."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(8):
        way.loss(model, step).backward()
        optimizer.step()
        if none:
            for parameter in module.parameters():
                parameter.grad = None
        else:
            module.zero_grad(set_to_none=False)
    return module


@program(BOTH)
def gradients_read_after_the_step(way: Way) -> nn.Module:
    """What is in `.grad` is the mean of all ranks' gradients, before and after the step."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    sums = [torch.zeros_like(parameter) for parameter in module.parameters()]
    for step in range(8):
        optimizer.zero_grad()
        way.loss(model, step).backward()
        with way.reduced(optimizer):
            _add(sums, module)
            optimizer.step()
        _add(sums, module)
    for number, one in enumerate(sums):
        module.register_buffer(f"sum{number}", one)
    return module


def _add(sums: list[Tensor], module: nn.Module) -> None:
    for one, parameter in zip(sums, module.parameters(), strict=True):
        assert parameter.grad is not None
        one.add_(parameter.grad)


@program(BOTH)
def an_optimizer_written_by_hand(way: Way) -> nn.Module:
    """Momentum in a list of tensors; under Horovod the optimizer that reduces never steps."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module, momentum=0.0))
    velocities = [torch.zeros_like(parameter) for parameter in module.parameters()]
    for step in range(8):
        optimizer.zero_grad()
        way.loss(model, step).backward()
        with way.reduced(optimizer), torch.no_grad():
            for velocity, parameter in zip(velocities, module.parameters(), strict=True):
                assert parameter.grad is not None
                parameter.sub_(velocity.mul_(0.9).add_(parameter.grad), alpha=0.1)
    return module


# --- steps that are left out ---


def _norm(module: nn.Module) -> Tensor:
    return torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()


@program(BOTH, cases={"sgd": (False,), "adamw": (True,)})
def steps_left_out_because_the_norm_is_large(way: Way, adam: bool) -> nn.Module:
    """By all ranks. Some are, some are not."""
    module = net()
    made = torch.optim.AdamW(module.parameters(), lr=0.01) if adam else sgd(module)
    model, optimizer = way.wrap(module, made)
    for step in range(8):
        optimizer.zero_grad()
        (way.loss(model, step) * (10.0 if step % 3 == 2 else 1.0)).backward()
        with way.reduced(optimizer):
            if float(_norm(module)) < 3.0:
                optimizer.step()
    return module


# --- gradients that are not finite ---

_LOSS = {"nan": float("nan"), "inf": float("inf")}


def _poisoned(way: Way, model: Any, step: int, poison: str) -> Tensor:
    """A loss that is not finite on the last rank in step 3, or of which one layer's gradient is not."""
    loss = way.loss(model, step)
    if step != 3 or hvd.rank() != hvd.size() - 1 or poison == "layer":
        return loss
    return loss * _LOSS[poison]


def _with_poisoned_layer(module: Any, poison: str) -> dict[str, int]:
    """Return where the step is to be written."""
    now = {"step": 0}
    if poison == "layer":
        module[2].weight.register_hook(
            lambda gradient: gradient * float("nan") if now["step"] == 3 and hvd.rank() == hvd.size() - 1 else gradient
        )
    return now


_POISONS = {f"{made}-{poison}": (made, poison) for made in ("sgd", "adamw") for poison in ("nan", "inf", "layer")}


def _made(module: nn.Module, name: str) -> torch.optim.Optimizer:
    return sgd(module) if name == "sgd" else torch.optim.AdamW(module.parameters(), lr=0.01)


@program(BOTH, cases=_POISONS, quick={"sgd-nan"})
def a_scaler_that_leaves_a_step_out(way: Way, made: str, poison: str) -> nn.Module:
    module = net()
    now = _with_poisoned_layer(module, poison)
    model, optimizer = way.wrap(module, _made(module, made))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(8):
        now["step"] = step
        optimizer.zero_grad()
        scaler.scale(_poisoned(way, model, step, poison)).backward()
        with way.reduced(optimizer):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
        scaler.update()
    module.register_buffer("scale", torch.tensor(scaler.get_scale()))
    return module


@program(BOTH)
def a_scaler_that_begins_too_high(way: Way) -> nn.Module:
    """The first steps overflow on every rank."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-40)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(10 * way.loss(model, step)).backward()
        with way.reduced(optimizer):
            scaler.step(optimizer)
        scaler.update()
    module.register_buffer("scale", torch.tensor(scaler.get_scale()))
    return module


@program(BOTH, cases=_POISONS, quick={"adamw-nan"})
def a_step_left_out_if_its_norm_is_not_finite(way: Way, made: str, poison: str) -> nn.Module:
    module = net()
    now = _with_poisoned_layer(module, poison)
    model, optimizer = way.wrap(module, _made(module, made))
    for step in range(8):
        now["step"] = step
        optimizer.zero_grad()
        _poisoned(way, model, step, poison).backward()
        with way.reduced(optimizer):
            if bool(torch.isfinite(nn.utils.clip_grad_norm_(module.parameters(), 1.0))):
                optimizer.step()
    return module


@program(BOTH)
def a_norm_that_raises_if_it_is_not_finite(way: Way) -> nn.Module:
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    raised = 0
    for step in range(8):
        optimizer.zero_grad()
        _poisoned(way, model, step, "nan").backward()
        with way.reduced(optimizer):
            try:
                nn.utils.clip_grad_norm_(module.parameters(), 1.0, error_if_nonfinite=True)
            except RuntimeError:
                raised += 1
                continue
            optimizer.step()
    assert raised == 1
    return module


@program(BOTH, cases=_POISONS, finite=False)
def a_gradient_that_nobody_checks(way: Way, made: str, poison: str) -> nn.Module:
    """As with dense averages everything is NaN in the end, on every rank."""
    module = net()
    now = _with_poisoned_layer(module, poison)
    model, optimizer = way.wrap(module, _made(module, made))
    for step in range(8):
        now["step"] = step
        optimizer.zero_grad()
        _poisoned(way, model, step, poison).backward()
        optimizer.step()
    return module
