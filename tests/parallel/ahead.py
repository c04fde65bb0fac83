"""Scenarios: `compression.ahead`, with Horovod and with `DistributedDataParallel`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from horovod_sparse.torch import MomentumCorrection, NoOp, RandomBlock, TopK

from .common import IN_DDP, assert_identical, digest, distributed, hvd, normals, raised
from .local import PULLED, Pulled
from .scenario import MPI, TORCHRUN, scenario

RATES = (0.1, 0.1, 0.2, 0.05, 0.05, 0.1)


def _points(step: int) -> dict[str, Tensor]:
    return {name: torch.from_numpy(normals(shape, step=step, rank=hvd.rank())) for name, shape in PULLED.items()}


def _made(compression: Any = None, make: Any = torch.optim.SGD, **settings: Any) -> tuple[Pulled, Any, Any, Any]:
    """Return what is trained, the model to call, its optimizer, and the compression."""
    bowl, compression = Pulled(), compression or TopK(0.1, warmup=None)
    model, optimizer = distributed(bowl, make(bowl.parameters(), lr=RATES[0], **settings), compression)
    return bowl, model, optimizer, compression


def _step(model: Any, optimizer: Any, step: int) -> None:
    """Without `ahead`."""
    optimizer.zero_grad()
    model(_points(step)).backward()
    optimizer.step()


def gradients_are_those_of_moved_parameters(
    coefficient: float, settings: dict[str, Any], make: Any = torch.optim.SGD, **arguments: Any
) -> Pulled:
    """The gradient is that at `x - c eta e`, with this rank's e. The step begins at x, bit by bit."""
    bowl, model, optimizer, compression = _made(RandomBlock(0.1, seed=3, warmup=None, **settings), make, **arguments)
    seen: dict[str, Tensor] = {}
    for name, parameter in bowl.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.__setitem__(name, gradient.clone()))
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        kept = compression.state_dict()["residuals"] if step else {}
        assert not step or any(residual.any() for residual in kept.values())
        before, points = bowl.values(), _points(step)
        optimizer.zero_grad()
        with compression.ahead(model if step % 2 else bowl, coefficient):
            model(points).backward()
        torch.testing.assert_close(bowl.values(), before, rtol=0.0, atol=0.0)
        optimizer.step()
        unit = 1.0 if compression.lr_in_residual else rate
        for name in PULLED:
            moved = before[name] - coefficient * unit * kept.get(name, 0.0)
            torch.testing.assert_close(seen[name], moved - points[name], rtol=1e-5, atol=1e-6)
    return bowl


class _BrokenError(Exception):
    pass


def parameters_are_back_whatever_happens() -> Pulled:
    """In forward, in backward, before or after: bit by bit. Training goes on."""
    bowl, model, optimizer, compression = _made()
    for step in range(3):
        _step(model, optimizer, step)

    def stop(*_: Any) -> None:
        raise _BrokenError

    def in_forward() -> None:
        with bowl.register_forward_pre_hook(stop):
            model(_points(3))

    before = digest(bowl.parameters())
    for broken in (stop, in_forward):

        def block(broken: Callable[[], object] = broken) -> None:
            with compression.ahead(model, 0.5):
                assert digest(bowl.parameters()) != before
                broken()

        raised(_BrokenError, block)
        assert digest(bowl.parameters()) == before
    if not IN_DDP:
        # DDP itself cannot go on after an exception in backward.
        def in_backward() -> None:
            with compression.ahead(model, 0.5), bowl.first.register_hook(stop):
                model(_points(3)).backward()

        raised(_BrokenError, in_backward)
        assert digest(bowl.parameters()) == before
        optimizer.zero_grad()
    for step in range(4, 6):
        optimizer.zero_grad()
        with compression.ahead(model, 0.5):
            model(_points(step)).backward()
        optimizer.step()
    return bowl


def writing_to_parameters_is_refused() -> Pulled:
    """By a step, by the user, or by loading. Those that had moved are what they were before the block."""
    bowl, model, optimizer, compression = _made()
    for step in range(2):
        _step(model, optimizer, step)

    def fill() -> None:
        with torch.no_grad():
            bowl.first.fill_(3.0)

    other = {name: torch.full_like(one, 0.5) for name, one in bowl.values().items()}
    writes: tuple[Callable[[], object], ...] = (fill, lambda: bowl.load_state_dict(other), optimizer.step)
    for number, write in enumerate(writes):
        optimizer.zero_grad()
        moved = {name for name, residual in compression.state_dict()["residuals"].items() if residual.any()}
        before = {name: one for name, one in bowl.values().items() if name in moved}
        assert moved == {"first", "second"}

        def block(number: int = number, write: Callable[[], object] = write) -> None:
            with compression.ahead(model, 0.5):
                model(_points(2 + number)).backward()
                write()

        assert "must not be written to within compression.ahead" in raised(RuntimeError, block)
        now = bowl.values()
        assert all(torch.equal(now[name], one) for name, one in before.items())
        if write is not optimizer.step:
            optimizer.step()
    _step(model, optimizer, 6)
    return bowl


def only_what_waits_and_is_trained_moves() -> Pulled:
    """Nothing before the first step, of a frozen parameter, without a residual, with 0, or while everything is sent."""
    for compression, coefficient in ((TopK(0.1, residual=False, warmup=None), 0.5), (NoOp(), 0.5), (TopK(0.1), 0.0)):
        bowl, model, optimizer, _ = _made(compression)
        for step in range(3):
            before = digest(bowl.parameters())
            optimizer.zero_grad()
            with compression.ahead(model, coefficient):
                assert digest(bowl.parameters()) == before
                model(_points(step)).backward()
            optimizer.step()
    bowl, model, optimizer, compression = _made()
    with compression.ahead(model, 0.5):
        assert all(bool((one == 0.0).all()) for one in bowl.parameters())
    for step in range(2):
        _step(model, optimizer, step)
    values = bowl.values()
    bowl.first.requires_grad_(False)
    with compression.ahead(model, 0.5):
        assert torch.equal(bowl.first, values["first"]) and not torch.equal(
            bowl.get_parameter("second"), values["second"]
        )
    bowl.first.requires_grad_(True)
    return bowl


def a_loaded_state_moves_before_the_first_step() -> Pulled:
    bowl, model, optimizer, compression = _made()
    for step in range(3):
        _step(model, optimizer, step)
    twin, called, its, resumed = _made()
    twin.load_state_dict(bowl.state_dict())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(compression.state_dict())
    if IN_DDP:
        # DDP has the values of the first rank.
        assert_identical(twin)
    for one, to_call, steps, its_compression in ((bowl, model, optimizer, compression), (twin, called, its, resumed)):
        for step in range(3, 6):
            steps.zero_grad()
            before = digest(one.parameters())
            with its_compression.ahead(to_call, 0.5):
                assert digest(one.parameters()) != before
                to_call(_points(step)).backward()
            steps.step()
    assert digest(twin.parameters()) == digest(bowl.parameters())
    return bowl


def a_wrong_coefficient_is_refused() -> Pulled:
    bowl, model, _, compression = _made()
    for wrong in (-0.1, 1.5, float("nan")):

        def block(wrong: float = wrong) -> None:
            with compression.ahead(model, wrong):
                pass

        assert "coefficient must be in [0, 1]" in raised(ValueError, block)
    return bowl


GRADIENTS = gradients_are_those_of_moved_parameters
_OWN_MOMENTUM = {"momentum": MomentumCorrection(0.9, masking=False), "granularity": "layer"}
LAWS: dict[str, tuple[Any, ...]] = {
    "gradients": (GRADIENTS, 0.5, {}),
    "gradients, 1": (GRADIENTS, 1.0, {}),
    "gradients, lr in residual": (GRADIENTS, 0.5, {"lr_in_residual": True}),
    "gradients, AdamW": (GRADIENTS, 0.5, {}, torch.optim.AdamW),
    "gradients, momentum of the optimizer": (partial(GRADIENTS, momentum=0.9), 0.5, {}),
    "gradients, momentum of the compressor": (GRADIENTS, 0.5, _OWN_MOMENTUM),
    "back": (parameters_are_back_whatever_happens,),
    "written": (writing_to_parameters_is_refused,),
    "waits": (only_what_waits_and_is_trained_moves,),
    "loaded": (a_loaded_state_moves_before_the_first_step,),
    "refused": (a_wrong_coefficient_is_refused,),
}


@scenario(*MPI, *TORCHRUN, cases=LAWS)
def ahead(law: Any, *arguments: Any) -> None:
    assert_identical(law(*arguments))
