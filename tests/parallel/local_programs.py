"""Scenarios: programs as users write them, which must train by local updates as they do by dense averages.

With SGD without momentum, `every=1` and everything sent, the parameters are those of dense averages. With AdamW and a small
ratio, the loss is near dense AdamW's, and the parameters are equal on all ranks to the bit whenever they are shared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel

from horovod_sparse.contrib.torch_workers import transport_of
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.torch import LocalUpdates, SIDCo
from horovod_sparse.torch.parameters import local_part
from horovod_sparse.torch.source import TensorSource

from .common import DEVICE, assert_close, assert_identical, digest, everyone, hvd, raised
from .programs.table import CLASSES, FEATURES, inputs_of, net
from .scenario import MPI_2, TORCHRUN_2, Scenario, scenario

PAIR = (MPI_2, TORCHRUN_2)
Optimizer = Callable[[Any], torch.optim.Optimizer]
SGD: Optimizer = partial(torch.optim.SGD, lr=0.1)
ADAMW: Optimizer = partial(torch.optim.AdamW, lr=5e-3, weight_decay=0.1)
STEPS = 40


class Dense:
    """Averages all gradients and steps the optimizer: what local updates stand beside."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.optimizer, self.model = optimizer, model
        self.param_groups = optimizer.param_groups
        self.transport = transport_of(None, torch.device(DEVICE))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def average(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    total = self.transport.start(Collective("allreduce", own.clone()))()
                    if total.any() or parameter.grad is not None:
                        parameter.grad = total / self.transport.world

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        if closure is not None:
            closure()
        self.average()
        self.optimizer.step()

    def ahead(self) -> AbstractContextManager[None]:
        return nullcontext()

    shared = ahead


@dataclass(frozen=True)
class Way:
    """How a program's optimizer becomes one of all workers."""

    optimizer: Optimizer
    make: Callable[[torch.optim.Optimizer, nn.Module], Any]
    ahead: bool = False
    """Whether gradients are computed ahead."""
    place: Callable[[nn.Module], Any] = lambda model: model
    """Puts a new model where it is trained."""

    def net(self, seed: int = 1) -> Any:
        return self.place(net(seed))

    def wrap(self, model: nn.Module, parameters: Any = None) -> Any:
        return self.make(self.optimizer(model.parameters() if parameters is None else parameters), model)

    def backward(self, local: Any, model: Callable[[Tensor], Tensor], step: int) -> Tensor:
        with local.ahead() if self.ahead else nullcontext():
            loss = loss_of(model, step)
            loss.backward()
        return loss

    def train(self, local: Any, model: nn.Module, steps: range) -> None:
        for step in steps:
            local.zero_grad()
            self.backward(local, model, step)
            local.step()


TEACHER = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(7))
"""Gives each input its label, so that there is something to learn."""


def loss_of(model: Callable[[Tensor], Tensor], step: int, rank: int | None = None) -> Tensor:
    inputs = inputs_of(step, hvd.rank() if rank is None else rank)
    return F.cross_entropy(model(inputs), (inputs @ TEACHER).argmax(1))


# --- programs ---


def plain(way: Way) -> nn.Module:
    model = way.net()
    way.train(way.wrap(model), model, range(STEPS))
    return model


def groups_whose_rates_are_zero(way: Way) -> nn.Module:
    """One throughout, one from the middle on, when something of it waits, and the others in the first step."""
    model = way.net()
    first, second, still, *others = model.parameters()
    groups = [
        {"params": [first], "lr": 0.0},
        {"params": [still], "weight_decay": 0.0},
        {"params": [second, *others]},
    ]
    local, before = way.wrap(model, groups), first.detach().clone()
    rates = [lambda step: min(step / 3, 1.0), lambda step: float(step < STEPS // 2), lambda step: min(step / 3, 1.0)]
    schedule = torch.optim.lr_scheduler.LambdaLR(local.optimizer, rates)
    for step in range(STEPS):
        kept = still.detach().clone()
        way.train(local, model, range(step, step + 1))
        assert step < STEPS // 2 or torch.equal(kept, still), step
        schedule.step()
    assert torch.equal(first, before)
    return model


def accumulation(way: Way) -> nn.Module:
    model = way.net()
    local = way.wrap(model)
    for step in range(STEPS):
        local.zero_grad()
        for part in range(2):
            way.backward(local, model, 2 * step + part)
        local.step()
    return model


def a_closure(way: Way) -> nn.Module:
    model = way.net()
    local = way.wrap(model)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            local.zero_grad()
            return way.backward(local, model, step)

        local.step(closure)
    return model


def writes_between_backward_and_step(way: Way) -> nn.Module:
    """A clamp that changes nothing, and decay by hand."""
    model = way.net()
    local = way.wrap(model)
    for step in range(STEPS):
        local.zero_grad()
        way.backward(local, model, step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-10.0, 10.0)
                parameter.mul_(0.999)
        local.step()
    return model


def a_clamp_after_every_step(way: Way) -> nn.Module:
    model = way.net()
    local = way.wrap(model)
    for step in range(STEPS):
        way.train(local, model, range(step, step + 1))
        with torch.no_grad(), local.shared():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)
    return model


def clipping(way: Way) -> nn.Module:
    """Each worker clips its own gradients."""
    model = way.net()
    local = way.wrap(model)
    for step in range(STEPS):
        local.zero_grad()
        way.backward(local, model, step)
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05
        local.step()
    return model


def sharpness_aware(way: Way) -> nn.Module:
    """Two passes per step, the second at parameters that the same perturbation has moved on all ranks."""
    model = way.net()
    local = way.wrap(model)
    for step in range(STEPS):
        with torch.no_grad():
            kept = [parameter.clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.add_(torch.sign(parameter), alpha=0.01)
        local.zero_grad()
        way.backward(local, model, step)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)
        local.step()
    return model


def weights_loaded_half_way(way: Way) -> nn.Module:
    """And a new head."""
    model = way.net()
    local = way.wrap(model)
    way.train(local, model, range(STEPS // 2))
    other = way.net(seed=5)
    with local.shared():
        model[0].load_state_dict(other[0].state_dict())
        model[-1].load_state_dict(other[-1].state_dict())
    way.train(local, model, range(STEPS // 2, STEPS))
    return model


def averages_of_weights(way: Way) -> nn.Module:
    """After the step, and of a model that forward has run through."""
    model = way.net()
    local, average = way.wrap(model), AveragedModel(model)
    for step in range(STEPS):
        way.train(local, model, range(step, step + 1))
        with local.shared():
            average.update_parameters(model)
            copied = copy.deepcopy(model)
            assert_close(copied, model, rtol=0.0, atol=0.0)
    assert_identical(average.module)
    return model


def a_moving_average_of_parameters(way: Way) -> nn.Module:
    """By hand. In the middle of training it takes the place of the parameters, for an evaluation."""
    model = way.net()
    local = way.wrap(model)
    average = [one.detach().clone() for one in model.parameters()]
    for step in range(STEPS):
        way.train(local, model, range(step, step + 1))
        with torch.no_grad(), local.shared():
            for mean, one in zip(average, model.parameters(), strict=True):
                mean.lerp_(one, 0.1)
            if step % 10 == 5:
                kept = [one.detach().clone() for one in model.parameters()]
                for one, mean in zip(model.parameters(), average, strict=True):
                    one.copy_(mean)
                loss_of(model, step)
                for one, value in zip(model.parameters(), kept, strict=True):
                    one.copy_(value)
    return model


def stochastic_weight_averaging(way: Way) -> nn.Module:
    """Its scheduler takes over half-way."""
    model = way.net()
    local, average = way.wrap(model), AveragedModel(model)
    schedule = SWALR(local.optimizer, swa_lr=2.0 * local.param_groups[0]["lr"], anneal_epochs=5)
    for step in range(STEPS):
        way.train(local, model, range(step, step + 1))
        if step >= STEPS // 2:
            with local.shared():
                average.update_parameters(model)
            schedule.step()
    assert_identical(average.module)
    return nn.ModuleList([model, average.module])


def mixed_precision(way: Way) -> nn.Module:
    model = way.net()
    local = way.wrap(model)
    for step in range(STEPS):
        local.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            way.backward(local, model, step)
        local.step()
    return model


class Tied(nn.Module):
    """Layers with one matrix, of which a bias is not trained, and a layer that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = net(sizes=(16, 16, 16)), net(sizes=(16, 4))
        self.body[2].weight = self.body[0].weight
        self.body[2].bias.requires_grad_(False)
        self.unused = nn.Linear(30, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def tied_unused_and_frozen_parameters(way: Way) -> nn.Module:
    """The frozen one is the optimizer's, too."""
    model = way.place(Tied())
    way.train(way.wrap(model), model, range(STEPS))
    del model.unused
    return model


def layers_that_thaw_and_freeze(way: Way) -> nn.Module:
    model = way.net()
    model[0].requires_grad_(False)
    local = way.wrap(model)
    for step in range(STEPS):
        if step in (8, 24):
            model[0].requires_grad_(step == 8)
            model[2].requires_grad_(step == 24)
            local.zero_grad()
        way.train(local, model, range(step, step + 1))
    return model


def two_models(way: Way) -> nn.Module:
    one, other = way.net(seed=1), way.net(seed=2)
    first, second = way.wrap(one), way.wrap(other)
    for step in range(STEPS):
        way.train(first, one, range(step, step + 1))
        way.train(second, other, range(step, step + 1))
    return nn.ModuleList([one, other])


def one_optimizer_for_each_parameter(way: Way) -> nn.Module:
    """Each steps as soon as backward has its gradient."""
    model = way.net()
    for parameter in model.parameters():
        local = way.wrap(model, [parameter])

        def step_at_once(_: Tensor, local: Any = local) -> None:
            local.step()
            local.zero_grad()

        parameter.register_post_accumulate_grad_hook(step_at_once)
    for step in range(STEPS):
        loss_of(model, step).backward()
    return model


def compiled(way: Way) -> nn.Module:
    model = way.net()
    local, faster = way.wrap(model), torch.compile(model, backend="eager")
    for step in range(STEPS):
        local.zero_grad()
        way.backward(local, faster, step)
        local.step()
    return model


def a_loss_scaler(way: Way) -> nn.Module:
    model = way.net()
    local, scaler = way.wrap(model), torch.amp.GradScaler(DEVICE, init_scale=2.0**8)
    for step in range(STEPS):
        local.zero_grad()
        with local.ahead() if way.ahead else nullcontext():
            scaler.scale(loss_of(model, step)).backward()
        if isinstance(local, Dense):
            scaler.unscale_(local.optimizer)
            local.step()
        else:
            scaler.step(local)
        scaler.update()
    return model


PROGRAMS = (
    plain,
    groups_whose_rates_are_zero,
    accumulation,
    a_closure,
    writes_between_backward_and_step,
    a_clamp_after_every_step,
    clipping,
    sharpness_aware,
    weights_loaded_half_way,
    averages_of_weights,
    a_moving_average_of_parameters,
    stochastic_weight_averaging,
    mixed_precision,
    tied_unused_and_frozen_parameters,
    layers_that_thaw_and_freeze,
    two_models,
    one_optimizer_for_each_parameter,
    compiled,
    a_loss_scaler,
)


# --- laws ---


class Checked(LocalUpdates):
    """Raises after a step unless all workers have the same shared parameters, to the bit."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        self.check()
        return loss

    def check(self) -> None:
        with self.shared():
            mine = digest(local_part(one) for group in self.param_groups for one in group["params"])
        source = self.compression.source
        assert isinstance(source, TensorSource)
        theirs = source.driver.transport.everyone(mine)
        assert len({*theirs}) == 1, theirs


@dataclass(frozen=True)
class Placing:
    """Where models are, and who has what of them."""

    place: Callable[[nn.Module], Any] = lambda model: model
    group: Callable[[], Any] = lambda: None

    def way(self, optimizer: Optimizer, compression: Callable[[], Any], ahead: bool = False, **settings: Any) -> Way:
        """Train by local updates."""

        def make(given: torch.optim.Optimizer, model: nn.Module) -> LocalUpdates:
            return Checked(given, model, compression(), group=self.group(), **settings)

        return Way(optimizer, make, ahead, self.place)


PLAIN = Placing()


def sparse() -> SIDCo:
    return SIDCo(0.1, min_numel=0, warmup=2.0)


def whole(parameter: Any) -> Tensor:
    found: Tensor = getattr(parameter, "full_tensor", lambda: parameter)()
    return found


def sending_all_is_dense(program: Any, placing: Placing = PLAIN) -> None:
    dense = program(Way(SGD, Dense))
    found = program(placing.way(SGD, lambda: None))
    begun = dict(net().named_parameters())
    for (name, mine), theirs in zip(found.named_parameters(), dense.parameters(), strict=True):
        atol = 1e-6
        if program is mixed_precision:
            # A last bit of a parameter may change an activation by 2^-8 of it, and so each step's gradient.
            atol = 2.0**-8 * float((theirs - begun[name]).abs().max())
        torch.testing.assert_close(whole(mine), theirs, rtol=1e-4, atol=atol, msg=partial("{}: {}".format, name))


def sparse_ends_near_dense(program: Any, placing: Placing = PLAIN) -> None:
    """On the data of the last steps, of all ranks, with `every` 1 ahead, and 4."""

    def loss(model: nn.Module) -> float:
        models = [*model] if isinstance(model, nn.ModuleList) else [model]
        steps = range(STEPS - 7, STEPS)
        with torch.no_grad():
            found = [loss_of(one, s, rank) for one in models for s in steps for rank in range(hvd.size())]
        return float(torch.stack(found).mean())

    begins, dense = loss(net()), loss(program(Way(ADAMW, Dense)))
    for every, ahead in ((1, True), (4, False)):
        model = program(placing.way(ADAMW, sparse, ahead, every=every))
        # Steps are a multiple of both.
        found = loss(model)
        # A quarter of what training has gained is more than any of these programs loses, and what diverges has lost all.
        assert found < dense + (begins - dense) / 4, (every, ahead, found, dense, begins)


def mark(law: Any, programs: Any, quick: tuple[Any, ...], launches: Callable[[Any], Any] = lambda _: PAIR) -> None:
    """Let the scenarios of a law be those of these programs."""
    name = law.__name__
    law.scenarios = [Scenario(f"{name}[{one.__name__}]", law, (one,), launches(one), one in quick) for one in programs]


# Of workers that clip their own gradients, the mean is another one.
mark(
    sending_all_is_dense,
    [one for one in PROGRAMS if one is not clipping],
    (plain, writes_between_backward_and_step, layers_that_thaw_and_freeze),
)
mark(sparse_ends_near_dense, PROGRAMS, (plain, layers_that_thaw_and_freeze))


# --- what one rank alone meets ---


@scenario(*PAIR, cases={"by a norm": ("norm",), "by the argument": ("argument",), "by a scaler": ("scaler",)})
def a_step_that_one_rank_leaves_out_moves_by_the_others(how: str) -> None:
    model = net()
    compression, optimizer = SIDCo(0.1, min_numel=0, warmup=2.0), ADAMW(model.parameters())
    local: Any = LocalUpdates(optimizer, model, compression, skip_nonfinite=how == "argument")
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**8, enabled=how == "scaler")
    for step in range(12):
        local.zero_grad()
        spoiled = float("inf") if (step, hvd.rank()) == (5, 1) else 1.0
        scaler.scale(loss_of(model, step) * spoiled).backward()
        before = next(model.parameters()).detach().clone()
        finite = all(bool(one.grad.isfinite().all()) for one in model.parameters())
        if how == "norm" and not finite:
            local.skip()
        else:
            scaler.step(local)
            scaler.update()
        assert not torch.equal(next(model.parameters()), before)
        assert_identical(model)
    assert all(bool(one.isfinite().all()) for one in model.parameters())
    if how == "scaler":
        assert everyone(scaler.get_scale()) == [2.0**8, 2.0**7]


@scenario(*PAIR)
def not_a_number_on_one_rank_comes_out_on_all() -> None:
    """As with a dense average. The residuals are finite, and go on where weights are loaded again."""
    model = net()
    local = LocalUpdates(SGD(model.parameters()), model, SIDCo(0.1, min_numel=0, warmup=None))
    way = Way(SGD, LocalUpdates)
    way.train(local, model, range(4))
    good = copy.deepcopy(model.state_dict())
    local.zero_grad()
    (loss_of(model, 4) * (float("nan") if hvd.rank() else 1.0)).backward()
    local.step()
    assert not any(bool(one.isfinite().all()) for one in model.parameters())
    assert all(bool(one.isfinite().all()) for one in local.compression.state_dict()["residuals"].values())
    model.load_state_dict(good)
    way.train(local, model, range(5, 9))
    assert_identical(model)
    assert all(bool(one.isfinite().all()) for one in model.parameters())


class Raises(torch.optim.AdamW):
    """Raises when it has moved the parameters, if it `raises`."""

    raises = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.raises:
            raise ArithmeticError("half-way")
        return result


@scenario(*PAIR, cases={"one, every step": ((1,), 1), "all, every step": ((0, 1), 1), "one, every third": ((1,), 3)})
def a_step_that_raises_and_is_caught_raises_on_all(ranks: tuple[int, ...], every: int) -> None:
    """Parameters are those of the last exchange then, and training goes on."""

    model = net()
    optimizer = Raises(model.parameters(), lr=5e-3)
    local, way = (
        LocalUpdates(optimizer, model, SIDCo(0.1, min_numel=0, warmup=2.0), every=every),
        Way(SGD, LocalUpdates),
    )
    way.train(local, model, range(2 * every))
    before = copy.deepcopy(model.state_dict())
    way.train(local, model, range(every - 1))
    optimizer.raises = hvd.rank() in ranks
    mine = ArithmeticError if optimizer.raises else RuntimeError
    text = raised(mine, lambda: way.train(local, model, range(every - 1, every)))
    assert "half-way" in text
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name])
    optimizer.raises = False
    way.train(local, model, range(2 * every))
    assert_identical(model)


@scenario(*PAIR)
def a_forward_pass_moves_nothing() -> None:
    model = net()
    local = LocalUpdates(ADAMW(model.parameters()), model, SIDCo(0.02, min_numel=0, warmup=None))
    Way(SGD, LocalUpdates).train(local, model, range(5))
    before = copy.deepcopy(model.state_dict())
    model(inputs_of(0, 0))
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@scenario(*PAIR)
def parameters_that_are_not_trained_are_not_sent() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    model[0].requires_grad_(False)
    local = LocalUpdates(ADAMW(model.parameters()), model, SIDCo(1.0, min_numel=0))
    model(torch.ones(3, 100)).square().sum().backward()
    local.step()
    assert local.compression.stats().last.dense_bytes_sent + local.compression.stats().last.total.bytes_sent <= 8 * 1010
    assert not any("0." in name for name in local.compression.state_dict()["residuals"])
