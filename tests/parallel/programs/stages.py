"""Programs: training in stages, copies of models and optimizers, states that are put back."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import torch
from torch import nn

from .table import BOTH, DDP, HOROVOD, Way, named, net, program, sgd


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


@program(DDP, cases={"new": (True,), "same": (False,)}, quick={"new"})
def stages_with_a_new_ddp(way: Way, renewed: bool) -> nn.Module:
    """Three on one module, with a new optimizer or the same."""
    module = net()
    optimizer: Any = sgd(module)
    for stage in range(3):
        if renewed and stage:
            optimizer = (_adamw, sgd)[stage % 2](module)
        way.train(way.ddp(module, optimizer), optimizer, range(4 * stage, 4 * stage + 4))
    return module


@program(HOROVOD, cases={"dropped": (False,), "copied": (True,)}, quick={"copied"})
def stages_with_a_new_optimizer_of_horovods(way: Way, copied: bool) -> nn.Module:
    """On one module, of which nothing holds the last optimizer any more, or on a copy of it."""
    module = net()
    for stage in range(3):
        module = copy.deepcopy(module) if copied else module
        optimizer = way.horovod((sgd, _adamw)[stage % 2](module), named(module))
        way.train(module, optimizer, range(4 * stage, 4 * stage + 4))
        del optimizer
        gc.collect()
    return module


@program(BOTH)
def a_model_that_grows(way: Way) -> nn.Module:
    """A layer more in each stage; the layers before go on."""
    module = net()
    for stage in range(3):
        *first, last = module
        module = copy.deepcopy(nn.Sequential(*first, nn.Linear(48, 48), nn.Tanh(), last))
        model, optimizer = way.wrap(module, sgd(module))
        way.train(model, optimizer, range(3 * stage, 3 * stage + 3))
    return module


@program(BOTH)
def a_copy_of_the_model(way: Way) -> nn.Module:
    """The best model so far, put back in the end, and trained on."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    way.train(model, optimizer, range(4))
    best = copy.deepcopy(module)
    way.train(model, optimizer, range(4, 8))
    last = copy.deepcopy(module)
    module.load_state_dict(best.state_dict())
    way.train(model, optimizer, range(8, 10))
    return nn.ModuleList([module, best, last])


@program(BOTH)
def a_copy_of_the_model_that_is_trained_too(way: Way) -> nn.Module:
    """From step 4 on there are two, in turns."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    way.train(model, optimizer, range(4))
    twin = copy.deepcopy(module)
    other, other_optimizer = way.wrap(twin, sgd(twin, lr=0.05), "twin")
    for step in range(4, 10):
        way.train(model, optimizer, [step])
        way.train(other, other_optimizer, [step])
    return nn.ModuleList([module, twin])


@program(BOTH, cases={"sgd": (False,), "adamw": (True,)}, quick={"sgd"})
def a_state_that_is_put_back(way: Way, adam: bool) -> nn.Module:
    """Model and optimizer go back to step 4 after step 7, by way of a file."""
    module = net()
    model, optimizer = way.wrap(module, _adamw(module) if adam else sgd(module))
    way.train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    way.train(model, optimizer, range(4, 7))
    file.seek(0)
    saved = torch.load(file)
    module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    way.train(model, optimizer, range(7, 11))
    return module


@program(DDP, cases={"sgd": (False,), "adamw": (True,)})
def a_copy_of_model_and_optimizer(way: Way, adam: bool) -> nn.Module:
    """Both are trained on, the copy in a DDP of its own."""
    module = net()
    optimizer = _adamw(module) if adam else sgd(module)
    model = way.ddp(module, optimizer)
    way.train(model, optimizer, range(4))
    twin, its = copy.deepcopy((module, optimizer))
    other = way.ddp(twin, its)
    for step in range(4, 8):
        way.train(model, optimizer, [step])
        way.train(other, its, [step + 50])
    return nn.ModuleList([module, twin])


@program(HOROVOD, cases={"sgd": (False,), "adamw": (True,)})
def a_copy_of_model_and_state(way: Way, adam: bool) -> nn.Module:
    """The copy goes on with the state of the other's optimizer."""
    make = _adamw if adam else sgd
    module = net()
    optimizer = way.horovod(make(module), named(module))
    way.train(module, optimizer, range(4))
    twin = copy.deepcopy(module)
    its = way.horovod(make(twin), named(twin, "twin"))
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(4, 8):
        way.train(module, optimizer, [step])
        way.train(twin, its, [step + 50])
    return nn.ModuleList([module, twin])


@program(DDP)
def a_copy_of_ddp(way: Way) -> nn.Module:
    """Evaluated, not trained: the original goes on."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    way.train(model, optimizer, range(4))
    copied = copy.deepcopy(model).module
    way.train(model, optimizer, range(4, 8))
    return nn.ModuleList([module, copied])


@program(BOTH)
def a_model_that_is_evaluated_between(way: Way) -> nn.Module:
    """With and without gradients, in `eval()` and `train()`, on the wrapped model and on the module."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    losses = []
    for step in range(8):
        way.train(model, optimizer, [step])
        module.eval()
        with torch.no_grad() if step % 2 else torch.inference_mode():
            losses.append(float(way.loss(model, 0)) * 0.0 + float(sum(p.sum() for p in module.parameters())))
        module.train()
        way.loss(module, 1)
    module.register_buffer("losses", torch.tensor(losses))
    return module


@program(BOTH)
def a_model_whose_parameters_the_user_sets(way: Way) -> nn.Module:
    """Weights are clipped, normalised and set again after a step, and one is replaced in its memory."""
    module: Any = net()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(8):
        way.train(model, optimizer, [step])
        with torch.no_grad():
            module[0].weight.clamp_(-0.2, 0.2)
            module[2].weight.div_(module[2].weight.norm(dim=1, keepdim=True))
            if step == 4:
                module[4].weight.data = torch.full_like(module[4].weight, 0.01)
    return module
