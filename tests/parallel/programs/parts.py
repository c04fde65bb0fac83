"""Programs: parameters that are not all trained in every step, or that several models or optimizers have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..common import everyone, hvd
from .table import BOTH, CLASSES, DDP, FEATURES, HOROVOD, Way, named, net, program, sgd


class Branched(nn.Module):
    """A body and two heads; `head` names those that a forward pass goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net(1, (FEATURES, 48, 48))
        self.a, self.b = net(2, (48, 24, CLASSES)), net(3, (48, 24, CLASSES))

    def forward(self, x: Tensor, heads: str = "ab") -> Tensor:
        y = torch.tanh(self.body(x))
        return torch.stack([getattr(self, head)(y) for head in heads]).sum(0)


class Two(nn.Module):
    """Two networks that have nothing in common but their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = net(1, (FEATURES, 32, CLASSES)), net(2, (FEATURES, 32, CLASSES))

    def forward(self, x: Tensor, parts: str = "ab") -> Tensor:
        return torch.stack([getattr(self, part)(x) for part in parts]).sum(0)


def _loss(way: Way, model: Any, step: int, parts: str) -> Tensor:
    return way.loss(lambda x: model(x, parts), step)


@contextmanager
def toggled(module: nn.Module) -> Iterator[None]:
    """Frozen meanwhile, as Lightning's `toggle_optimizer` does it to the parameters of other optimizers."""
    module.requires_grad_(False)
    yield
    module.requires_grad_(True)


def _two(way: Way, momentum: float = 0.9, **options: Any) -> tuple[Two, Any, dict[str, Any]]:
    """Two parts, each with an optimizer."""
    module = Two()
    made = {part: sgd(getattr(module, part), momentum=momentum) for part in "ab"}
    if not way.in_horovod:
        return module, way.ddp(module, **options), made
    parts = {part: named(getattr(module, part), part) for part in "ab"}
    return module, module, {part: way.horovod(made[part], parts[part]) for part in "ab"}


_ZEROED = {"none": (True,), "kept": (False,)}


@program(BOTH, cases={"both": ("ab",), "one": ("",)}, quick={"both"})
def parts_in_turns_that_are_toggled(way: Way, through: str) -> nn.Module:
    """The forward pass goes through both, or through the one that is trained."""
    module, model, optimizers = _two(way, find_unused_parameters=True)
    for step in range(12):
        part, other = "ab"[step % 2], "ba"[step % 2]
        with toggled(getattr(module, other)):
            optimizers[part].zero_grad()
            _loss(way, model, step, through or part).backward()
            optimizers[part].step()
    return module


@program(BOTH, quick=True)
def parts_in_turns_that_are_not_toggled(way: Way) -> nn.Module:
    """Each optimizer zeroes its own gradients only."""
    module, model, optimizers = _two(way, find_unused_parameters=True)
    for step in range(12):
        part = "ab"[step % 2]
        optimizers[part].zero_grad()
        _loss(way, model, step, part).backward()
        optimizers[part].step()
    return module


@program(DDP, cases=_ZEROED)
def parts_in_turns_with_everything_zeroed(way: Way, none: bool) -> nn.Module:
    module, model, optimizers = _two(way, find_unused_parameters=True)
    for step in range(12):
        part = "ab"[step % 2]
        module.zero_grad(set_to_none=none)
        _loss(way, model, step, part).backward()
        optimizers[part].step()
    return module


@program(DDP)
def parts_in_turns_through_both(way: Way) -> nn.Module:
    """Gradients of the part that waits add up until its turn, and are averaged over and over."""
    module, model, optimizers = _two(way)
    for step in range(12):
        part = "ab"[step % 2]
        optimizers[part].zero_grad()
        _loss(way, model, step, "ab").backward()
        optimizers[part].step()
    return module


@program(BOTH, cases={"long": (3,), "short": (1,)})
def parts_that_are_thawed_one_after_the_other(way: Way, length: int) -> nn.Module:
    """And frozen again. One optimizer has all of them."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module), find_unused_parameters=True)
    layers = [module[0], module[2], module[4]]
    for step in range(12):
        for number, layer in enumerate(layers):
            layer.requires_grad_(number != step // length % 3)
        optimizer.zero_grad()
        way.loss(model, step).backward()
        optimizer.step()
    return module


@program(BOTH, cases={"turns": ("ab",), "rarely": ("aaab",)}, quick={"turns"})
def tasks_in_turns(way: Way, turns: str) -> nn.Module:
    """A body that is always trained, two heads, one optimizer."""
    module = Branched()
    model, optimizer = way.wrap(module, sgd(module, weight_decay=0.01), find_unused_parameters=True)
    for step in range(12):
        optimizer.zero_grad()
        _loss(way, model, step, turns[step % len(turns)]).backward()
        optimizer.step()
    return module


@program(BOTH)
def tasks_that_differ_between_ranks(way: Way) -> nn.Module:
    """In some steps a head has a gradient on one rank only."""
    module = Branched()
    model, optimizer = way.wrap(module, sgd(module), find_unused_parameters=True)
    for step in range(12):
        optimizer.zero_grad()
        _loss(way, model, step, "ab"[(step // 2 + hvd.rank() * step) % 2]).backward()
        optimizer.step()
    return module


@program(BOTH, cases={"first": ("first",), "turns": ("turns",)})
def a_rank_without_a_gradient(way: Way, when: str) -> nn.Module:
    """Its data were of no use: it counts with zero."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(8):
        optimizer.zero_grad()
        useless = hvd.rank() == (step % 2 if when == "turns" else 0) and (when == "turns" or step == 0)
        if not way.in_horovod:
            (way.loss(model, step) * (0.0 if useless else 1.0)).backward()
        elif not useless:
            way.loss(model, step).backward()
        optimizer.step()
    return module


# --- parameters that DDP ignores ---


@program(DDP, cases={"averaged": (True,), "local": (False,)})
def parameters_that_ddp_ignores(way: Way, averaged: bool) -> nn.Module:
    """The user averages them, or each rank keeps its own."""
    module = net()
    last = module[4]
    ignored = [f"4.{name}" for name, _ in last.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    optimizer = sgd(module)
    model = way.ddp(module, optimizer)
    for step in range(8):
        optimizer.zero_grad()
        way.loss(model, step).backward()
        if averaged:
            for parameter in last.parameters():
                parameter.grad = torch.stack(everyone(parameter.grad)).mean(0)
        optimizer.step()
    return module if averaged else nn.ModuleDict({"shared": module[:4], "local": last})


@program(BOTH)
def parameters_of_each_ranks_own(way: Way) -> nn.Module:
    """Outside of the model. In DDP the same optimizer steps them; Horovod's would average them."""
    module, own = net(), nn.Parameter(torch.zeros(FEATURES))
    alone = torch.optim.SGD([own], lr=0.1, momentum=0.9)
    given = sgd(module)
    if not way.in_horovod:
        given.add_param_group({"params": [own]})
    model, optimizer = way.wrap(module, given)
    for step in range(8):
        optimizer.zero_grad()
        alone.zero_grad()
        way.loss(lambda x: model(x + own), step).backward()
        optimizer.step()
        if way.in_horovod:
            alone.step()
    return nn.ModuleDict({"shared": module, "local": nn.ParameterList([own])})


# --- parameters that are unused, used twice, frozen or late ---


class Odd(nn.Module):
    """One layer is used twice, one weight is that of the first and of the last layer, one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 24)
        self.twice = nn.Linear(24, 24)
        self.unused = nn.Linear(24, 30)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.out = nn.Linear(24, 20, bias=False)
        self.out.weight = self.embed.weight
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        y = torch.tanh(self.twice(self.embed(tokens)))
        return self.out(torch.tanh(self.frozen(torch.tanh(self.twice(y)))) * self.scale + self.empty.sum())


@program(BOTH, cases={"decayed": (0.01,), "plain": (0.0,)}, quick={"decayed"})
def parameters_of_every_kind(way: Way, decay: float) -> nn.Module:
    """Unused, used twice, tied, frozen, empty, without a dimension."""
    module = Odd()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=decay)
    model: Any = module
    if way.in_horovod:
        optimizer = way.horovod(optimizer, module.named_parameters())
    else:
        model = way.ddp(module, optimizer, find_unused_parameters=True)
    for step in range(8):
        optimizer.zero_grad()
        tokens = torch.randint(0, 20, (8, 6), generator=torch.Generator().manual_seed(2 * step + hvd.rank()))
        nn.functional.cross_entropy(model(tokens).transpose(1, 2), tokens.roll(1, 1)).backward()
        optimizer.step()
    return module


def _frozen(module: Any, layers: Sequence[int], frozen: bool) -> None:
    for layer in layers:
        module[layer].requires_grad_(not frozen)


@program(BOTH)
def layers_frozen_from_the_first_step_on(way: Way) -> nn.Module:
    module = net()
    _frozen(module, [0], True)
    way.train(*way.wrap(module, sgd(module)), range(8))
    return module


@program(BOTH, quick=True)
def layers_thawed_late(way: Way) -> nn.Module:
    """Frozen after they were wrapped, before the first step."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module), find_unused_parameters=True)
    _frozen(module, [0, 2], True)
    way.train(model, optimizer, range(4))
    _frozen(module, [2], False)
    way.train(model, optimizer, range(4, 8))
    _frozen(module, [0], False)
    way.train(model, optimizer, range(8, 12))
    return module


@program(DDP)
def layers_thawed_late_in_a_new_ddp(way: Way) -> nn.Module:
    module = net()
    _frozen(module, [0, 2], True)
    optimizer = sgd(module)
    way.train(way.ddp(module, optimizer), optimizer, range(4))
    _frozen(module, [0, 2], False)
    way.train(way.ddp(module, optimizer), optimizer, range(4, 8))
    return module


@program(HOROVOD, alone=True)
def layers_added_late(way: Way) -> nn.Module:
    """Stock Horovod never reduces a group that is added later."""
    module = net()
    *first, last = [module[0], module[2], module[4]]
    parameters = [parameter for layer in first for parameter in layer.parameters()]
    names = [(name, one) for name, one in module.named_parameters() if any(one is other for other in parameters)]
    optimizer = way.horovod(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), names)
    _frozen(module, [4], True)
    way.train(module, optimizer, range(4))
    _frozen(module, [4], False)
    # Horovod's optimizer does not know the defaults of the one that it was made of.
    optimizer.add_param_group({"params": [*last.parameters()], "lr": 0.05, "momentum": 0.9})
    way.train(module, optimizer, range(4, 8))
    return module


# --- several models or optimizers ---


class Chain(nn.Module):
    """Two models, one after the other."""

    def __init__(self, models: Iterable[Any]) -> None:
        super().__init__()
        self.models = [*models]

    def forward(self, x: Tensor) -> Tensor:
        for model in self.models:
            x = model(x)
        return x


@program(BOTH, cases={"sgd": (False,), "adamw": (True,)}, quick={"adamw"})
def two_models_with_one_optimizer(way: Way, adam: bool) -> nn.Module:
    modules = nn.ModuleList([net(1, (FEATURES, 40, 24)), net(2, (24, 40, CLASSES))])
    parameters = [*modules.parameters()]
    optimizer: Any = torch.optim.AdamW(parameters, lr=0.01) if adam else sgd(modules)
    models: list[Any] = [*modules]
    if way.in_horovod:
        optimizer = way.horovod(optimizer, named(modules))
    else:
        models = [way.ddp(module, optimizer) for module in modules]
    way.train(Chain(models), optimizer, range(8))
    return modules


@program(BOTH, cases={"sgd-adamw": (True,), "sgd-sgd": (False,)}, quick={"sgd-adamw"})
def one_model_with_two_optimizers(way: Way, adam: bool) -> nn.Module:
    """Both step in every step."""
    module = Branched()
    body = named(module.body, "body")
    heads = [*named(module.a, "a"), *named(module.b, "b")]
    first: Any = torch.optim.SGD([one for _, one in body], lr=0.1, momentum=0.9)
    rest = [one for _, one in heads]
    second: Any = torch.optim.AdamW(rest, lr=0.01) if adam else torch.optim.SGD(rest, lr=0.02, momentum=0.5)
    model: Any = module
    if way.in_horovod:
        first, second = way.horovod(first, body), way.horovod(second, heads)
    else:
        model = way.ddp(module)
    for step in range(8):
        first.zero_grad()
        second.zero_grad()
        way.loss(model, step).backward()
        first.step()
        second.step()
    return module


@program(BOTH)
def two_models_with_two_losses(way: Way) -> nn.Module:
    """One backward pass for both, two optimizers, the second steps in every second step."""
    a, b = net(1), net(2)
    first, first_optimizer = way.wrap(a, sgd(a), "a")
    second, second_optimizer = way.wrap(b, sgd(b), "b")
    for step in range(8):
        first_optimizer.zero_grad()
        second_optimizer.zero_grad()
        (way.loss(first, step) + way.loss(second, step + 50)).backward()
        first_optimizer.step()
        if step % 2:
            second_optimizer.step()
        elif way.in_horovod:
            second_optimizer.synchronize()
    return nn.ModuleList([a, b])
