"""Scenarios: what has arrived and what waits is what went in, also where parameters are trained in turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from horovod_sparse.torch import SIDCo, TopK
from tests.harness.launch import Launch

from ..common import assert_identical, everyone, hvd, normals
from ..scenario import Scenario
from .table import BOTH, DDP, HOROVOD, Way, named

_ENTRIES = 2_000


class Stream(nn.Module):
    """Each of its parts gets the same gradient in every step, and notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterDict({part: nn.Parameter(torch.zeros(_ENTRIES)) for part in "ab"})
        self.gradients = {
            part: torch.from_numpy(normals([_ENTRIES], step=0, rank=hvd.rank(), salt=salt))
            for salt, part in enumerate("ab")
        }
        self.given = {part: torch.zeros(_ENTRIES) for part in "ab"}

    def forward(self, parts: str, factor: float = 1.0, *, counts: bool = True) -> Tensor:
        for part in parts:
            if self.parts[part].requires_grad and counts:
                self.given[part] += self.gradients[part]
        return torch.stack([(self.parts[part] * self.gradients[part]).sum() for part in parts]).sum() * factor


class Run:
    """A stream that is reduced, by one optimizer or by one for each part. A step at rate 1 is what has arrived."""

    def __init__(self, make: Callable[[], Any], optimizers: int, **arguments: Any) -> None:
        self.stream, self.compressions = Stream(), list[Any]()
        self.way = Way("sparse", partial(self._made, make))
        every = named(self.stream)
        names = [every] if optimizers == 1 else [[one] for one in every]
        self.model: Any = self.stream
        if not self.way.in_horovod:
            self.model = self.way.ddp(self.stream, find_unused_parameters=True)
        made: list[Any] = []
        for some in names:
            sgd = torch.optim.SGD([parameter for _, parameter in some], lr=1.0)
            made.append(self.way.horovod(sgd, some, **arguments) if self.way.in_horovod else sgd)
        self.optimizers = {"a": made[0], "b": made[-1]}

    def _made(self, make: Callable[[], Any]) -> Any:
        self.compressions.append(make())
        return self.compressions[-1]

    def step(self, parts: str, *, by: str = "", none: bool = True) -> None:
        """A backward pass through some parts, and a step of the optimizer of one of them."""
        optimizer = self.optimizers[by or parts[0]]
        optimizer.zero_grad() if none else optimizer.zero_grad(set_to_none=False)
        self.model(parts).backward()
        optimizer.step()

    def check(self) -> None:
        """The law. A part that is compressed has something that waits."""
        residuals: dict[str, Tensor] = {}
        for compression in self.compressions:
            residuals |= compression.state_dict()["residuals"]
        for name, parameter in self.stream.parts.items():
            mine = (residuals[f"parts.{name}"].reshape(-1).clone(), self.stream.given[name])
            waits, given = (torch.stack(all_ranks).mean(0) for all_ranks in zip(*everyone(mine), strict=True))
            assert int((waits != 0).sum()) > _ENTRIES // 4, f"{name}: nothing waits"
            torch.testing.assert_close(
                -parameter.detach() + waits, given, rtol=1e-5, atol=1e-5, msg=partial("{}: {}".format, name)
            )
        assert_identical(self.stream)


def plain(make: Callable[[], Any]) -> Run:
    run = Run(make, 1)
    for _ in range(12):
        run.step("ab")
    return run


def toggled_parts(make: Callable[[], Any]) -> Run:
    run = Run(make, 2)
    for step in range(24):
        part, other = "ab"[step % 2], "ba"[step % 2]
        run.stream.parts[other].requires_grad_(False)
        run.step("ab", by=part)
        run.stream.parts[other].requires_grad_(True)
    return run


def parts_not_toggled(make: Callable[[], Any]) -> Run:
    run = Run(make, 2)
    for step in range(24):
        run.step("ab"[step % 2])
    return run


def parts_zeroed_in_place(make: Callable[[], Any]) -> Run:
    run = Run(make, 2)
    for step in range(24):
        run.step("ab"[step % 2], none=False)
    return run


def tasks_of_one_optimizer(make: Callable[[], Any]) -> Run:
    run = Run(make, 1)
    for step in range(24):
        run.step("ab"[step % 2])
    return run


def frozen_for_long(make: Callable[[], Any]) -> Run:
    run = Run(make, 1)
    for step in range(24):
        run.stream.parts["b"].requires_grad_(not 6 <= step < 15)
        run.step("ab")
    return run


def others_on_each_rank(make: Callable[[], Any]) -> Run:
    """In every second step the ranks have gradients of different parts."""
    run = Run(make, 1)
    for step in range(24):
        run.step("ab"[hvd.rank() % 2] if step % 2 else "ab")
    return run


def a_step_that_is_not_finite(make: Callable[[], Any]) -> Run:
    """On one rank; all leave it out, and what they had sent for all buckets."""
    run = Run(make, 1)
    optimizer = run.optimizers["a"]
    for step in range(12):
        optimizer.zero_grad()
        poisoned = step == 5 and hvd.rank() == 1
        run.model("ab", float("nan") if poisoned else 1.0, counts=step != 5).backward()
        with run.way.reduced(optimizer):
            if all(bool(p.grad.isfinite().all()) for p in run.stream.parts.values()):
                optimizer.step()
    return run


def accumulated_in_ddp(make: Callable[[], Any]) -> Run:
    run = Run(make, 1)
    for _ in range(12):
        run.optimizers["a"].zero_grad()
        with run.model.no_sync():
            run.model("ab").backward()
        run.model("ab").backward()
        run.optimizers["a"].step()
    return run


def accumulated_in_horovod(make: Callable[[], Any]) -> Run:
    run = Run(make, 1, backward_passes_per_step=2)
    for step in range(12):
        run.optimizers["a"].zero_grad()
        for _ in range(1 + step % 2):
            run.model("ab").backward()
        run.optimizers["a"].step()
    return run


def a_rank_without_gradients(make: Callable[[], Any]) -> Run:
    """In some steps. Horovod counts it with zero."""
    run = Run(make, 1)
    for step in range(12):
        run.optimizers["a"].zero_grad()
        if step % 3 != 1 or hvd.rank() == 0:
            run.model("ab").backward()
        run.optimizers["a"].step()
    return run


_LAUNCHES: dict[Callable[[Callable[[], Any]], Run], tuple[Launch, ...]] = {
    **dict.fromkeys(
        [
            plain,
            toggled_parts,
            parts_not_toggled,
            tasks_of_one_optimizer,
            frozen_for_long,
            others_on_each_rank,
            a_step_that_is_not_finite,
        ],
        BOTH,
    ),
    **dict.fromkeys([parts_zeroed_in_place, accumulated_in_ddp], DDP),
    **dict.fromkeys([accumulated_in_horovod, a_rank_without_gradients], HOROVOD),
}


def nothing_is_lost_or_counted_twice(one: Callable[[Callable[[], Any]], Run]) -> None:
    for kind in (SIDCo, partial(TopK, granularity="layer")):
        one(partial(kind, 0.05, min_numel=0, warmup=None)).check()


_QUICK = {toggled_parts, parts_not_toggled, frozen_for_long, others_on_each_rank, a_step_that_is_not_finite}

_law: Any = nothing_is_lost_or_counted_twice
_law.scenarios = [
    Scenario(f"{_law.__name__}[{one.__name__}]", _law, (one,), launches, one in _QUICK)
    for one, launches in _LAUNCHES.items()
]
