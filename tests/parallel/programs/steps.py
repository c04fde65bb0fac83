"""Programs: SGD in all its forms, gradients that are accumulated, DDP's options."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from ..common import hvd
from .table import BOTH, DDP, HOROVOD, Way, named, net, program, sgd

_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "momentum": {},
    "nesterov": {"nesterov": True, "weight_decay": 0.01},
    "dampening": {"dampening": 0.1},
    "decay": {"momentum": 0.0, "weight_decay": 0.01},
}


@program(BOTH, cases={name: (settings,) for name, settings in _SETTINGS.items()}, quick={"nesterov"})
def stochastic_descent(way: Way, settings: dict[str, Any]) -> nn.Module:
    module = net()
    way.train(*way.wrap(module, sgd(module, **settings)), range(8))
    return module


@program(BOTH)
def a_schedule_of_rate_and_momentum(way: Way) -> nn.Module:
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10, base_momentum=0.5, max_momentum=0.9)
    for step in range(8):
        way.train(model, optimizer, [step])
        schedule.step()
    return module


@program(BOTH)
def groups_of_their_own_rates(way: Way) -> nn.Module:
    module = net()
    first, *others = module.parameters()
    groups = [{"params": [first], "lr": 0.02, "momentum": 0.0}, {"params": others, "weight_decay": 0.1}]
    way.train(*way.wrap(module, torch.optim.SGD(groups, lr=0.1, momentum=0.9)), range(8))
    return module


@program(BOTH)
def momentum_that_the_user_changes(way: Way) -> nn.Module:
    """In the optimizer's own state, half-way."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    way.train(model, optimizer, range(4))
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"].mul_(0.5)
    way.train(model, optimizer, range(4, 8))
    return module


@program(BOTH)
def a_loss_scaled_by_hand(way: Way) -> nn.Module:
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(8):
        optimizer.zero_grad()
        (way.loss(model, step) * 1024).backward()
        with way.reduced(optimizer):
            for parameter in module.parameters():
                parameter.grad.div_(1024)
            optimizer.step()
    return module


@program(BOTH)
def activations_computed_again(way: Way) -> nn.Module:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    module = Again()
    way.train(*way.wrap(module, sgd(module)), range(8))
    return module


# --- accumulation ---


@program(DDP, cases={"no_sync": (True,), "every_pass": (False,)}, quick={"no_sync", "every_pass"})
def accumulation_in_ddp(way: Way, local: bool) -> nn.Module:
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(8):
        optimizer.zero_grad()
        for part in range(3):
            with model.no_sync() if local and part < 2 else nullcontext():
                (way.loss(model, 3 * step + part) / 3).backward()
        optimizer.step()
    return module


@program(DDP)
def accumulation_over_two_steps(way: Way) -> nn.Module:
    """Gradients are not zeroed after every second step."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(8):
        if step % 2 == 0:
            optimizer.zero_grad()
        way.loss(model, step).backward()
        optimizer.step()
    return module


@program(HOROVOD, quick=True)
def accumulation_in_horovod(way: Way) -> nn.Module:
    """The last step of each epoch of three steps has one pass only. In the end there are three passes."""
    module = net()
    optimizer = way.horovod(sgd(module), named(module), backward_passes_per_step=2)
    for step in range(8):
        if step == 6:
            optimizer.set_backward_passes_per_step(3)
        optimizer.zero_grad()
        passes = 3 if step > 5 else 1 if step % 3 == 2 else 2
        for part in range(passes):
            (way.loss(module, 3 * step + part) / passes).backward()
        optimizer.step()
    return module


# --- DDP's options ---

_OPTIONS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static-views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused-views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "one-bucket": {"bucket_cap_mb": 25},
}


@program(DDP, cases={name: (options, False) for name, options in _OPTIONS.items()})
def options_of_ddp(way: Way, options: dict[str, Any], accumulate: bool) -> nn.Module:
    module = net()
    optimizer = sgd(module)
    model = way.ddp(module, optimizer, **options)
    for step in range(8):
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                way.loss(model, step + 100).backward()
        way.loss(model, step).backward()
        optimizer.step()
    return module


@program(DDP, cases={name: (_OPTIONS[name],) for name in ("views", "unused-views")})
def accumulation_with_options(way: Way, options: dict[str, Any]) -> nn.Module:
    return options_of_ddp(way, options, True)


@program(DDP)
def a_rank_with_fewer_data(way: Way) -> nn.Module:
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    with Join([model]):
        way.train(model, optimizer, range(6 + 2 * hvd.rank()))
    return module


# --- what Horovod's optimizer offers besides ---


@program(HOROVOD, alone=True)
def gradients_set_to_none_or_zero(way: Way) -> nn.Module:
    """Stock Horovod's `zero_grad` has no argument."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(8):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        way.loss(model, step).backward()
        optimizer.step()
    return module


@program(HOROVOD)
def gradients_computed_by_hand(way: Way) -> nn.Module:
    """No backward pass reaches the parameters' hooks."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(8):
        parameters = [*module.parameters()]
        gradients = torch.autograd.grad(way.loss(model, step), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return module


@program(HOROVOD)
def a_step_after_synchronize_without_skipping(way: Way) -> nn.Module:
    """What was clipped is averaged again."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(8):
        optimizer.zero_grad()
        way.loss(model, step).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        optimizer.step()
    return module


@program(HOROVOD, cases={"sum": (True,), "predivided": (False,)})
def operations_of_horovod(way: Way, is_sum: bool) -> nn.Module:
    module = net()
    arguments = {"op": hvd.Sum} if is_sum else {"gradient_predivide_factor": 2.0}
    way.train(module, way.horovod(sgd(module, lr=0.05), named(module), **arguments), range(8))
    return module
