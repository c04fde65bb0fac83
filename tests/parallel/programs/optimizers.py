"""Programs: every optimizer of PyTorch, some of other libraries, optimizers that are exchanged or call a closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..common import everyone
from .table import BOTH, DDP, HOROVOD, Way, named, net, program, sgd

_ELSEWHERE = {"Optimizer", "SGD", "SparseAdam", "LBFGS", "Muon"}
"""SGD is in `steps`, LBFGS and Muon below; SparseAdam takes sparse gradients only."""
_SETTINGS: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 1.0},
    "Adagrad": {"lr": 0.05},
    "Adamax": {"lr": 0.02},
    "RMSprop": {"lr": 3e-3, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 1e-3},
    "ASGD": {"lr": 0.1, "t0": 4.0},
    "Adam": {"lr": 0.01, "amsgrad": True},
}
_NAMES = [
    name
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in _ELSEWHERE
]


class Lamb(torch.optim.Optimizer):
    """Adam's step, as long as the parameter is."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                m, v = state["m"], state["v"]
                m.lerp_(parameter.grad, 1 - group["betas"][0])
                v.lerp_(parameter.grad.square(), 1 - group["betas"][1])
                update = m / (v.sqrt() + group["eps"])
                length = parameter.norm().clamp(0.1, 10.0) / update.norm().clamp(min=1e-6)
                parameter.sub_(update * length, alpha=group["lr"])


class Lion(torch.optim.Optimizer):
    """Signs of an average."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    parameter.sub_(average.lerp(parameter.grad, 0.1).sign(), alpha=group["lr"])
                    average.lerp_(parameter.grad, 0.01)


class ScheduleFree(torch.optim.Optimizer):
    """Parameters are y for training, x for evaluation; z and y make x again."""

    def __init__(self, params: Any, lr: float = 0.2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    def _interpolate(self, to_train: bool) -> None:
        for group in self.param_groups:
            if group["training"] != to_train:
                group["training"] = to_train
                weight = 1 - group["beta"] if to_train else 1 - 1 / group["beta"]
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.data.lerp_(self.state[parameter]["z"], weight)

    def train(self) -> None:
        self._interpolate(True)

    def eval(self) -> None:
        self._interpolate(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["training"]
            group["k"] += 1
            c, lr, beta = 1 / group["k"], group["lr"], group["beta"]
            for y in group["params"]:
                if y.grad is None:
                    continue
                z = self.state[y].setdefault("z", y.detach().clone())
                y.lerp_(z, c)
                y.add_(y.grad, alpha=lr * (beta * (1 - c) - 1))
                z.sub_(y.grad, alpha=lr)


_MINE: dict[str, Any] = {"Lamb": Lamb, "Lion": Lion}
_QUICK = {"AdamW", "Lamb"}


@program(BOTH, cases={name: (name,) for name in [*_NAMES, *_MINE]}, quick=_QUICK)
def optimizers(way: Way, name: str) -> nn.Module:
    module = net()
    kind = _MINE.get(name) or getattr(torch.optim, name)
    way.train(*way.wrap(module, kind(module.parameters(), **_SETTINGS.get(name, {"lr": 0.01}))), range(8))
    return module


if hasattr(torch.optim, "Muon"):

    @program(BOTH)
    def muon_for_matrices_and_adamw_for_the_rest(way: Way) -> nn.Module:
        module = net()
        matrices = [(name, one) for name, one in module.named_parameters() if one.ndim == 2]
        others = [(name, one) for name, one in module.named_parameters() if one.ndim != 2]
        model: Any = module if way.in_horovod else way.ddp(module)
        stepped: list[Any] = []
        for names, made in (
            (matrices, torch.optim.Muon([one for _, one in matrices], lr=0.02)),
            (others, torch.optim.AdamW([one for _, one in others], lr=0.01)),
        ):
            stepped.append(way.horovod(made, names) if way.in_horovod else made)
        for step in range(8):
            for optimizer in stepped:
                optimizer.zero_grad()
            way.loss(model, step).backward()
            for optimizer in stepped:
                optimizer.step()
        return module


@program(BOTH, quick=True)
def an_optimizer_with_two_modes(way: Way) -> nn.Module:
    module = net()
    model, optimizer = way.wrap(module, ScheduleFree(module.parameters()))
    losses = []
    for step in range(9):
        optimizer.train()
        way.train(model, optimizer, [step])
        if step % 3 == 2:
            optimizer.eval()
            with torch.no_grad():
                losses.append(torch.stack([p.square().sum() for p in module.parameters()]).sum())
    module.register_buffer("losses", torch.stack(losses))
    return module


@program(DDP, cases={"views": (True,), "copies": (False,)})
def an_optimizer_that_is_divided_among_ranks(way: Way, views: bool) -> nn.Module:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = net()
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=views
    )
    way.train(way.ddp(module), optimizer, range(8))
    return module


# --- optimizers that are exchanged ---

_KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.01),
}


@program(
    DDP,
    cases={"from-sgd": (["sgd", "adamw", "sgd"],), "from-adamw": (["adamw", "sgd", "adamw"],)},
    quick={"from-adamw"},
)
def another_optimizer_in_mid_training(way: Way, names: list[str]) -> nn.Module:
    module = net()
    first = _KINDS[names[0]](module)
    model = way.ddp(module, first)
    for number, name in enumerate(names):
        way.train(model, _KINDS[name](module) if number else first, range(4 * number, 4 * number + 4))
    return module


@program(
    HOROVOD,
    cases={"from-sgd": (["sgd", "adamw", "sgd"],), "from-adamw": (["adamw", "sgd", "adamw"],)},
    quick={"from-adamw"},
)
def another_optimizer_after_horovods_average(way: Way, names: list[str]) -> nn.Module:
    """Horovod's optimizer averages, and others step: it can be made only once for a parameter."""
    module = net()
    averaging = way.horovod(_KINDS[names[0]](module), named(module))
    for number, name in enumerate(names):
        optimizer = _KINDS[name](module) if number else averaging
        for step in range(4 * number, 4 * number + 4):
            averaging.zero_grad()
            way.loss(module, step).backward()
            with way.reduced(averaging):
                optimizer.step()
    return module


@program(BOTH)
def an_optimizers_settings_and_state_loaded(way: Way) -> nn.Module:
    module, other = net(), net(3)
    model, optimizer = way.wrap(module, sgd(module))
    way.train(model, optimizer, range(4))
    given = sgd(other, lr=0.03, momentum=0.5, nesterov=True)
    other(torch.ones(2, 16)).sum().backward()
    given.step()
    optimizer.load_state_dict(given.state_dict())
    way.train(model, optimizer, range(4, 8))
    return module


# --- closures ---


def _lbfgs(module: nn.Module, **settings: Any) -> Any:
    return torch.optim.LBFGS(module.parameters(), lr=0.3, max_iter=4, history_size=5, **settings)


def _step_with_closure(way: Way, model: Any, optimizer: Any, step: int, *, in_closure: bool) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = way.loss(model, step)
        loss.backward()
        if in_closure and way.in_horovod:
            optimizer.synchronize()
        # A line search must see the same loss on every rank.
        return torch.stack(everyone(loss.detach())).mean()

    if in_closure and way.in_horovod:
        with optimizer.skip_synchronize():
            optimizer.step(closure)
    else:
        optimizer.step(closure)


_SEARCHES: dict[str, Any] = {"fixed": ({},), "wolfe": ({"line_search_fn": "strong_wolfe"},)}


@program(BOTH, cases=_SEARCHES, quick={"wolfe"})
def lbfgs_that_averages_in_its_closure(way: Way, settings: dict[str, Any]) -> nn.Module:
    module = net()
    model, optimizer = way.wrap(module, _lbfgs(module, **settings))
    for step in range(3):
        _step_with_closure(way, model, optimizer, step // 3, in_closure=True)
    return module


@program(HOROVOD, cases=_SEARCHES, alone=True)
def lbfgs_with_a_closure(way: Way, settings: dict[str, Any]) -> nn.Module:
    """Stock Horovod reduces once, before the closure."""
    module = net()
    model, optimizer = way.wrap(module, _lbfgs(module, **settings))
    for step in range(3):
        _step_with_closure(way, model, optimizer, step // 3, in_closure=False)
    return module


def _with_closure(way: Way, kind: str) -> nn.Module:
    module = net()
    model, optimizer = way.wrap(module, _KINDS[kind](module))
    for step in range(8):
        _step_with_closure(way, model, optimizer, step, in_closure=False)
    return module


@program(HOROVOD, cases={name: (name,) for name in _KINDS}, alone=True)
def a_closure_in_horovod(way: Way, kind: str) -> nn.Module:
    """Stock Horovod reduces before the closure, which makes gradients anew."""
    return _with_closure(way, kind)


@program(DDP, cases={name: (name,) for name in _KINDS})
def a_closure_in_ddp(way: Way, kind: str) -> nn.Module:
    return _with_closure(way, kind)
