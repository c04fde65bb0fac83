"""Scenarios: `torch.compile` around a step, a model, also one in DDP, and a whole training step changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.torch import NoOp, SIDCo, comm_hook

from .common import (
    BUCKET_BYTES,
    IN_DDP,
    assert_close,
    assert_identical,
    digest,
    distributed,
    kept,
    loss_of,
    small_model,
    train,
)
from .scenario import MPI_2, TORCHRUN_2, scenario

STEPS = 4
Compile = Callable[[Any], Any]


def compiler(backend: str) -> Compile:
    """`torch.compile` without what earlier scenarios have compiled."""
    torch.compiler.reset()
    return lambda function: torch.compile(function, backend=backend)


def whole_steps(optimizer: Any, model: nn.Module, compile_it: Compile) -> None:
    step = compile_it(lambda number: train(model, optimizer, [number]))
    for number in range(STEPS):
        step(number)


def updates(optimizer: Any, model: nn.Module, compile_it: Compile) -> None:
    step = compile_it(lambda: optimizer.step())
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        step()


def models(optimizer: Any, model: nn.Module, compile_it: Compile) -> None:
    train(compile_it(model), optimizer, range(STEPS))


CASES = {"step": (updates, "eager"), "model": (models, "eager"), "whole": (whole_steps, "eager")}


def with_the_bare_hook(model: nn.Module, optimizer: Any, compression: Any, **arguments: Any) -> tuple[nn.Module, Any]:
    """Return the model to call and the optimizer to step. The first backward pass, which may be compiled, makes the source."""
    wrapped = DistributedDataParallel(model, **arguments)
    wrapped.register_comm_hook(compression, comm_hook)
    return wrapped, optimizer


@scenario(MPI_2, TORCHRUN_2, cases=CASES)
def compiling_changes_nothing(way: Callable[..., None], backend: str, join: Callable[..., Any] = distributed) -> None:
    # What Inductor makes of a model or an update rounds in another way than PyTorch's operations. With `NoOp` that changes no
    # selection.
    is_exact, trained = backend == "eager", []
    for compile_it in (lambda function: function, compiler(backend)):
        model = small_model()
        compression: Any = SIDCo(0.05, granularity=BUCKET_BYTES, warmup=None) if is_exact else NoOp()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        # PyTorch's compiler takes no buckets of DDP that are smaller than DDP's first one.
        called, optimizer = join(model, sgd, compression, **({"bucket_cap_mb": 25} if IN_DDP else {}))
        way(optimizer, called, compile_it)
        assert_identical(model)
        trained.append((model, compression))
    (plain, first), (compiled, second) = trained
    if is_exact:
        assert digest(compiled.parameters()) == digest(plain.parameters())
        assert kept(first) == kept(second)
    else:
        assert_close(compiled, plain)


@scenario(TORCHRUN_2)
def compiling_changes_nothing_with_the_bare_hook() -> None:
    compiling_changes_nothing(whole_steps, "eager", with_the_bare_hook)


@scenario(TORCHRUN_2, quick=False)
def compiling_to_machine_code_changes_nothing() -> None:
    # It takes a quarter of a minute. What it compiles is what the other backend is given.
    if shutil.which("c++"):
        compiling_changes_nothing(whole_steps, "inductor")
