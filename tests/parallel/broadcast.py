"""Scenarios: our namespace broadcasts what stock Horovod refuses, and what it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import horovod_sparse.torch as hvd

from .common import assert_identical, digest, everyone, raised
from .scenario import PAIR, scenario

TYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.complex128, torch.bool, torch.uint8, torch.int16, torch.int64),
)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda one: one,
    "channels_last": lambda one: one.contiguous(memory_format=torch.channels_last),
    "transposed": lambda one: one.transpose(0, 3),
    "part": lambda one: one[:, 1:, ::2],
    "scalar": lambda one: one[0, 0, 0, 0],
    "empty": lambda one: one[:0],
}


@scenario(*PAIR, cases={str(dtype).removeprefix("torch."): (dtype,) for dtype in TYPES})
def tensors_of_every_type_and_layout_are_broadcast(dtype: torch.dtype) -> None:
    """All ranks begin with other values. They end with those of the last rank, bit by bit, in the memory where they were."""
    root = hvd.size() - 1
    values = [torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).add(7 * rank).to(dtype) for rank in range(hvd.size())]
    for as_given in (
        dict,
        lambda named: [*named.items()],
        lambda named: [*named.values()],
        lambda named: iter(named.items()),
    ):
        mine = {name: change(values[hvd.rank()].clone()) for name, change in LAYOUTS.items()}
        where = {name: (one.data_ptr(), one.stride()) for name, one in mine.items()}
        # The order in which a dictionary was filled may differ.
        order = sorted(mine, reverse=as_given is dict and hvd.rank() == 0)
        hvd.broadcast_parameters(as_given({name: mine[name] for name in order}), root_rank=root)
        for name, change in LAYOUTS.items():
            assert digest([mine[name]]) == digest([change(values[root])]), name
            assert (mine[name].data_ptr(), mine[name].stride()) == where[name], name


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "stateless": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1),
}


@scenario(*PAIR, cases={name: (make,) for name, make in OPTIMIZERS.items()})
def optimizers_go_on_as_the_root_does(make: Callable[[Iterable[Tensor]], torch.optim.Optimizer]) -> None:
    """Only the root has trained before. Half of the model is in bfloat16, the other in channels_last; LBFGS takes neither."""
    torch.manual_seed(hvd.rank())
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    optimizer = make(model.parameters())
    if not isinstance(optimizer, torch.optim.LBFGS):
        model.to(memory_format=torch.channels_last)
        model[2].to(torch.bfloat16)
    images = torch.ones(2, 3, 8, 8).mul(torch.arange(3.0).reshape(1, 3, 1, 1))

    def loss() -> Any:
        optimizer.zero_grad()
        hidden = model[1](model[0](images)).to(model[2].weight.dtype)
        total = F.cross_entropy(model[2](hidden).float(), torch.tensor([1, 2]))
        total.backward()
        return total

    if hvd.rank() == 0:
        # A schedule may give a number of NumPy's.
        optimizer.param_groups[0]["lr"] = np.float64(0.01)
        optimizer.step(loss)
        optimizer.step(loss)
    before = digest(model.parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert digest(model.parameters()) == before, "parameters are not part of the state"
    assert everyone(float(optimizer.param_groups[0]["lr"])) == [0.01] * hvd.size()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(3):
        optimizer.step(loss)
    assert_identical(model)


@scenario(*PAIR)
def a_setting_that_only_a_pickle_could_hold_is_refused_on_all_ranks() -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1 + hvd.rank())
    optimizer.param_groups[0]["home"] = Path("a") if hvd.rank() == 1 else "a"
    message = raised(ValueError, lambda: hvd.broadcast_optimizer_state(optimizer, root_rank=1))
    assert "sent: optimizer['param_groups'][0]['home'] must be what torch.load(weights_only=True) reads" in message
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert everyone(optimizer.param_groups[0]["lr"]) == [0.1] * hvd.size()


@scenario(*PAIR)
def residuals_are_not_broadcast() -> None:
    torch.manual_seed(0)
    model = nn.Linear(50, 60)
    compression: Any = hvd.TopK(0.05, min_numel=0, warmup=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 50), 1.0 + hvd.rank())).square().mean().backward()
        optimizer.step()
    before = {name: one.clone() for name, one in compression.state_dict()["residuals"].items()}
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    for name, one in compression.state_dict()["residuals"].items():
        assert torch.equal(one, before[name])
    assert len(set(everyone(digest(before.values())))) == hvd.size()


@scenario(*PAIR)
def what_is_no_tensor_is_refused() -> None:
    wrong: dict[str, Any] = {"a": torch.ones(2), "b": 3.0}
    text = raised(TypeError, lambda: hvd.broadcast_parameters(wrong, root_rank=0))
    assert "params must have tensors only, got float" in text
