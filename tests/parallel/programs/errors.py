"""Programs: errors that the user's own code raises and catches, on all ranks or on one where dense averages survive it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..common import hvd
from .table import BOTH, DDP, HOROVOD, Way, named, net, program, sgd

_WHO = {"all": (True,), "one": (False,)}


class BrokenError(RuntimeError):
    """What the user's code raises."""


class Breaking(nn.Module):
    """Its forward pass, or the backward pass before or after the last layer, breaks when `where` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = net(1, (16, 48, 48)), net(2, (48, 32, 4))
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise BrokenError
        y = torch.tanh(self.first(x))
        z = self.last(self._breaking(y, "middle"))
        return self._breaking(z, "start")

    def _breaking(self, x: Tensor, where: str) -> Tensor:
        if x.requires_grad:
            now = self.where

            def hook(gradient: Tensor) -> Tensor:
                if now == where:
                    raise BrokenError
                return gradient

            x.register_hook(hook)
        return x


def _who(everyone: bool) -> bool:
    return everyone or hvd.rank() == 1


_RAISES = (3, 4, 7)
"""The steps that break."""


@program(BOTH, cases={"forward": ("forward",), "start": ("start",)}, quick={"start"})
def a_step_left_out_after_an_error(way: Way, where: str) -> nn.Module:
    """Before any parameter has a gradient, on all ranks."""
    module = Breaking()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(10):
        module.where = where if step in _RAISES else ""
        optimizer.zero_grad()
        try:
            way.loss(model, step).backward()
        except BrokenError:
            continue
        optimizer.step()
    return module


@program(BOTH)
def an_error_between_forward_and_backward(way: Way) -> nn.Module:
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(10):
        optimizer.zero_grad()
        try:
            loss = way.loss(model, step)
            if step in _RAISES:
                raise BrokenError
            loss.backward()
        except BrokenError:
            continue
        optimizer.step()
    return module


@program(DDP, quick=True)
def other_data_after_an_error_on_one_rank(way: Way) -> nn.Module:
    """The forward pass breaks on one rank, which goes on with a loss of zero."""
    module = Breaking()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(10):
        optimizer.zero_grad()
        module.where = "forward" if step in _RAISES and hvd.rank() == 1 else ""
        try:
            loss = way.loss(model, step)
        except BrokenError:
            module.where = ""
            loss = way.loss(model, step) * 0.0
        loss.backward()
        optimizer.step()
    return module


@program(DDP, quick=True)
def an_error_within_backward_and_a_new_ddp(way: Way) -> nn.Module:
    """DDP itself does not go on after some of its buckets were averaged, on all ranks."""
    module = Breaking()
    optimizer = sgd(module)
    model = way.ddp(module, optimizer)
    for step in range(10):
        optimizer.zero_grad()
        module.where = "middle" if step in _RAISES else ""
        try:
            way.loss(model, step).backward()
        except BrokenError:
            model = way.ddp(module, optimizer)
            continue
        optimizer.step()
    return module


@program(HOROVOD, cases=_WHO, quick={"all", "one"})
def a_step_without_a_gradient_after_an_error_in_forward(way: Way, everyone: bool) -> nn.Module:
    """Where it was raised the rank counts with zero: momentum goes on."""
    module = Breaking()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(10):
        optimizer.zero_grad()
        module.where = "forward" if step in _RAISES and _who(everyone) else ""
        try:
            way.loss(model, step).backward()
        except BrokenError:
            assert module.where
        optimizer.step()
    return module


@program(HOROVOD, cases=_WHO, quick={"all", "one"})
def a_step_with_some_gradients_after_an_error_in_backward(way: Way, everyone: bool) -> nn.Module:
    """Horovod takes zero for the gradients that never came."""
    module = Breaking()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(10):
        optimizer.zero_grad()
        module.where = "middle" if step in _RAISES and _who(everyone) else ""
        try:
            way.loss(model, step).backward()
        except BrokenError:
            assert module.where
        optimizer.step()
    return module


@program(HOROVOD, cases=_WHO)
def a_step_left_out_after_an_error_in_backward(way: Way, everyone: bool) -> nn.Module:
    """All ranks end the reduction, learn whether anybody broke, and zero what came of it."""
    module = Breaking()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(10):
        optimizer.zero_grad()
        module.where = "middle" if step in _RAISES and _who(everyone) else ""
        broke = False
        try:
            way.loss(model, step).backward()
        except BrokenError:
            broke = True
        optimizer.synchronize()
        if any(hvd.allgather_object(broke, name="broke")):
            continue
        with optimizer.skip_synchronize():
            optimizer.step()
    return module


class Failing(torch.optim.SGD):
    """Raises once before it steps, when it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise BrokenError
        return super().step(closure)


def _failing(module: nn.Module) -> Failing:
    return Failing(module.parameters(), lr=0.1, momentum=0.9)


@program(BOTH, cases=_WHO, quick={"one"})
def a_step_of_the_optimizer_made_again(way: Way, everyone: bool) -> nn.Module:
    """After it raised, with the gradients that it has."""
    module = net()
    model, optimizer = way.wrap(module, _failing(module))
    for step in range(10):
        optimizer.fails = step in _RAISES and _who(everyone)
        optimizer.zero_grad()
        way.loss(model, step).backward()
        with way.reduced(optimizer):
            try:
                optimizer.step()
            except BrokenError:
                optimizer.step()
    return module


@program(HOROVOD)
def a_step_of_the_optimizer_made_and_reduced_again(way: Way) -> nn.Module:
    """On all ranks: Horovod averages the averages."""
    module = net()
    optimizer = way.horovod(_failing(module), named(module))
    for step in range(10):
        optimizer.fails = step in _RAISES
        optimizer.zero_grad()
        way.loss(module, step).backward()
        try:
            optimizer.step()
        except BrokenError:
            optimizer.step()
    return module


@program(BOTH)
def a_step_of_the_optimizer_left_out(way: Way) -> nn.Module:
    """It raised on all ranks."""
    module = net()
    model, optimizer = way.wrap(module, _failing(module))
    for step in range(10):
        optimizer.fails = step in _RAISES
        optimizer.zero_grad()
        way.loss(model, step).backward()
        try:
            optimizer.step()
        except BrokenError:
            continue
    return module


@program(HOROVOD)
def gradients_zeroed_too_early(way: Way) -> nn.Module:
    """Horovod refuses it; the user goes on with the step."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    refused = 0
    for step in range(8):
        optimizer.zero_grad()
        way.loss(model, step).backward()
        if step == 3:
            try:
                optimizer.zero_grad()
            except AssertionError:
                refused += 1
        optimizer.step()
    assert refused == 1
    return module
