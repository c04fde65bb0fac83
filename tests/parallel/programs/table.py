"""What a program is, how it can average gradients, and the table of all programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.torch import comm_hook, register
from tests.harness.launch import Launch

from ..common import IN_DDP, hvd
from ..scenario import MPI_2, TORCHRUN_2

HOROVOD, DDP = (MPI_2,), (TORCHRUN_2,)
BOTH = HOROVOD + DDP
FEATURES, CLASSES = 16, 4


def net(seed: int = 1, sizes: Sequence[int] = (FEATURES, 48, 48, CLASSES), *, bias: bool = True) -> nn.Sequential:
    """About 3,400 parameters, the same on every rank. Smooth, so that rounding is not amplified."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def inputs_of(step: int, rank: int, features: int = FEATURES) -> Tensor:
    """A rank's own, with a mean of its own."""
    return torch.randn(12, features, generator=torch.Generator().manual_seed(100 * step + rank)) + 0.3 * rank


def labels_of(step: int, rank: int) -> Tensor:
    return torch.randint(0, CLASSES, (12,), generator=torch.Generator().manual_seed(100 * step + rank + 50))


def sgd(module: nn.Module, lr: float = 0.1, momentum: float = 0.9, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum, **settings)


def named(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Parameter]]:
    """What Horovod's optimizer is given: its names must be unique among all that are reduced at the same time."""
    return [*module.named_parameters(prefix)]


@dataclass(frozen=True)
class Way:
    """How a program averages gradients."""

    name: str = "dense"
    make: Callable[[], Any] | None = None
    """Makes a compression. Without, averages are dense."""
    hooked: bool = False
    """Whether DDP gets the compression by its own method, which learns neither names nor an optimizer."""
    alone: bool = False
    """Whether this process has all ranks' data and averages nothing: for programs that stock Horovod gets wrong."""

    @property
    def in_horovod(self) -> bool:
        return not IN_DDP and not self.alone

    def loss(self, model: Callable[[Tensor], Tensor], step: int) -> Tensor:
        """Of this rank's data of a step."""
        ranks = range(hvd.size()) if self.alone else [hvd.rank()]
        return torch.stack([F.cross_entropy(model(inputs_of(step, r)), labels_of(step, r)) for r in ranks]).mean()

    def ddp(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, **arguments: Any) -> Any:
        """Put a module into DDP, which has several buckets."""
        model = DistributedDataParallel(module, **{"bucket_cap_mb": 0.005, **arguments})
        if self.make is not None:
            compression = self.make()
            if self.hooked:
                model.register_comm_hook(compression, comm_hook)
            else:
                register(model, compression, optimizer)
        return model

    def horovod(self, optimizer: Any, names: Iterable[tuple[str, nn.Parameter]], **arguments: Any) -> Any:
        """Put Horovod's optimizer around an optimizer."""
        if self.alone:
            return optimizer
        compression = hvd.Compression.none if self.make is None else self.make()
        return hvd.DistributedOptimizer(optimizer, named_parameters=names, compression=compression, **arguments)

    def wrap(self, module: nn.Module, optimizer: Any, prefix: str = "", **arguments: Any) -> tuple[Any, Any]:
        """Return the model to call and the optimizer to step. `arguments` are DDP's."""
        if self.alone:
            return module, optimizer
        if IN_DDP:
            return self.ddp(module, optimizer, **arguments), optimizer
        return module, self.horovod(optimizer, named(module, prefix))

    def reduced(self, *optimizers: Any) -> AbstractContextManager[Any]:
        """Between backward and step: within, gradients are those of all ranks. What Horovod's documentation shows."""
        if not self.in_horovod:
            return nullcontext()
        stack = ExitStack()
        for optimizer in optimizers:
            optimizer.synchronize()
            stack.enter_context(optimizer.skip_synchronize())
        return stack

    def train(self, model: Any, optimizer: Any, steps: Iterable[int]) -> None:
        for step in steps:
            optimizer.zero_grad()
            self.loss(model, step).backward()
            optimizer.step()


Run = Callable[..., nn.Module]


@dataclass(frozen=True)
class Program:
    """A program that trains, and returns what it has trained; parameters below `local` may differ between ranks."""

    name: str
    run: Run
    launches: tuple[Launch, ...]
    reference: Way
    """How the same program is right without our compressors."""
    finite: bool
    """Whether what it has trained is finite."""
    quick: bool


PROGRAMS: dict[str, Program] = {}
"""By name, in the order of their source."""


def program(
    launches: tuple[Launch, ...],
    *,
    cases: Mapping[str, tuple[Any, ...]] | None = None,
    alone: bool = False,
    finite: bool = True,
    quick: Collection[str] | bool = False,
) -> Callable[[Run], Run]:
    """Put a function into the table, once for each of the `cases`, which are its arguments besides the way.

    With `alone`, stock Horovod is wrong, and the reference is one process with all ranks' data. `make test` runs those that are
    `quick`: all or the cases named.
    """

    def mark(function: Run) -> Run:
        for case, arguments in ({"": ()} if cases is None else cases).items():
            name = f"{function.__name__}-{case}" if case else function.__name__
            is_quick = quick if isinstance(quick, bool) else case in quick
            run = partial(_run, function, arguments)
            one = Program(name, run, launches, replace(Way(), alone=alone), finite, is_quick)
            if PROGRAMS.setdefault(name, one) is not one:
                raise ValueError(f"there are two programs {name!r}")
        return function

    return mark


def _run(function: Run, arguments: tuple[Any, ...], way: Way) -> nn.Module:
    torch.manual_seed(0)
    return function(way, *arguments)
