"""Scenarios: parameters of every kind, a row each. They are reduced rightly, or refused on every rank."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from horovod_sparse.torch import TopK

from .common import (
    COMPRESSORS,
    assert_identical,
    assert_trains_as_one,
    everyone,
    normals,
    raised,
    reduce,
    small_model,
    train,
    whole_numbers,
    wrap,
    wrap_parameters,
    zeros,
)
from .kinds import KINDS, Kind
from .scenario import MPI_2, PAIR, scenario


@scenario(*PAIR, cases={name: (kinds,) for name, kinds in KINDS.items()})
def nothing_is_lost_of_any_kind_of_parameter(kinds: dict[str, Kind]) -> None:
    """What was sent and what is kept are what was given, to the last bit, with every exchange and every bucketing."""
    for compressor in ("TopK", "TopK-union", "SIDCo", "RandomK", "MiCRO", "NoOp"):
        for granularity in ("layer", "model"):
            compression = COMPRESSORS[compressor](min_numel=0, granularity=granularity)
            parameters = {
                name: zeros({name: shape}, getattr(torch, dtype))[name] for name, (shape, dtype) in kinds.items()
            }
            optimizer = wrap_parameters(parameters, compression, op=hvd.Sum)
            sent = {name: np.zeros(shape) for name, (shape, _) in kinds.items()}
            given = {name: np.zeros(shape) for name, (shape, _) in kinds.items()}
            for step in range(4):
                # Small whole numbers: half precision has all of their sums.
                mine = {n: whole_numbers(s, step=step, rank=hvd.rank()) % 16 for n, (s, _) in kinds.items()}
                reduce(optimizer, parameters, {name: np.asarray(gradient) for name, gradient in mine.items()})
                for name, theirs in given.items():
                    theirs += sum(np.asarray(one[name]) for one in everyone(mine))
                    reduced = parameters[name].grad
                    assert (reduced.dtype, reduced.shape) == (parameters[name].dtype, parameters[name].shape)
                    sent[name] += reduced.double().numpy()
            kept = everyone({n: r.double().numpy() for n, r in compression.state_dict()["residuals"].items()})
            for name in kinds:
                total = sent[name] + sum(one[name] for one in kept if name in one)
                np.testing.assert_array_equal(total, given[name], err_msg=f"{compression}, {name}")
            assert_identical(parameters.values())


class _Tied(nn.Module):
    """One weight serves two layers, and one is used twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.encode, self.decode = nn.Linear(30, 40, bias=False), nn.Linear(40, 30)
        self.again = nn.Linear(30, 30)
        self.tied = nn.Linear(30, 40)
        self.tied.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.decode(self.encode(x).tanh() + self.tied(x))
        return self.again(self.again(hidden).tanh()).square().mean()


@scenario(*PAIR)
def shared_parameters_count_once() -> None:
    model, compression = assert_trains_as_one(
        _Tied, lambda model, step, rank: model(torch.from_numpy(normals((8, 30), step=step, rank=rank)))
    )
    assert compression.state_dict()["residuals"].keys() == dict(model.named_parameters()).keys()


@scenario(MPI_2)
def a_new_shape_is_refused_where_it_has_no_gradient() -> None:
    """PyTorch does not see it then."""
    model = small_model()
    optimizer = wrap(model, TopK(0.05, warmup=None), momentum=0.0)
    train(model, optimizer, range(2))
    model[4].weight.data = torch.zeros(3, 3)
    optimizer.zero_grad()
    model.get_parameter("0.weight").square().sum().backward()
    assert "parameter '4.weight' must keep its shape" in raised(ValueError, optimizer.step)


@scenario(MPI_2, cases={"weight": ("weight",), "bias": ("bias",)})
def wrappers_without_memory_are_refused_by_name(name: str) -> None:
    """Compressed ones, and ones that are reduced dense; at the beginning, and later."""
    layer, optimizer = nn.Linear(100, 60), wrap(nn.Linear(100, 60), TopK(0.05, warmup=None))
    values = getattr(layer, name).detach()
    setattr(layer, name, nn.Parameter(TwoTensor(values, values.clone())))
    text = "must have its values in memory of its own, got a TwoTensor"
    assert f"parameter '{name}' {text}" in raised(TypeError, lambda: wrap(layer, TopK(0.05, warmup=None)))
    late = {"params": [getattr(layer, name)]}
    assert f"parameter 'allreduce.noname.1.0' {text}" in raised(TypeError, lambda: optimizer.add_param_group(late))
