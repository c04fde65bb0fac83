"""Scenarios: gradients of every kind. Half and double precision, other memory layouts, sparse embeddings."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn

from horovod_sparse.torch import DGC, NoOp, SIDCo, TopK

from .common import (
    assert_close,
    assert_identical,
    assert_trains_as_one,
    normals,
    raised,
    reduce,
    wrap,
    wrap_parameters,
    zeros,
)
from .scenario import EVERYWHERE, MPI, MPI_2, scenario


@scenario(
    *MPI,
    cases={
        "float16": (torch.float16, torch.float32),
        "bfloat16": (torch.bfloat16, torch.float32),
        "float64": (torch.float64, torch.float64),
    },
)
def precision(dtype: torch.dtype, residual_dtype: torch.dtype) -> None:
    # The sum over ranks is formed in the residual's precision and rounded once. Horovod adds in an order of its own, so the
    # gradients are multiples of 2^-10, whose sums over four ranks are exact in float32.
    def exact(shape: tuple[int, ...], step: int, rank: int) -> np.ndarray:
        return np.rint(normals(shape, step=step, rank=rank) * 2**10) / np.float32(2**10)

    shapes = {"weight": (30, 40), "other": (500,), "small": (10,)}
    parameters = zeros(shapes, dtype)
    compression = NoOp()
    optimizer = wrap_parameters(parameters, compression)
    for step in range(3):
        local = {name: exact(shape, step, hvd.rank()) for name, shape in shapes.items()}
        reduce(optimizer, parameters, local)
        for name in ("weight", "other"):
            given = [torch.from_numpy(exact(shapes[name], step, r)).to(dtype) for r in range(hvd.size())]
            expected = torch.zeros(shapes[name], dtype=residual_dtype)
            for one in given:
                expected += one.float() / hvd.size()
            assert parameters[name].grad.dtype == dtype
            assert parameters[name].grad.equal(expected.to(dtype)), name
    residuals = compression.state_dict()["residuals"]
    assert {residual.dtype for residual in residuals.values()} == {residual_dtype}
    assert_identical(parameters.values())


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Conv2d(3, 16, 3)
        self.second = nn.Conv2d(16, 8, 3)
        self.mixed = nn.Parameter(torch.randn(24, 40).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).mean() + (self.mixed.sin()).mean()


def _images(step: int, rank: int) -> torch.Tensor:
    images = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1000 * step + rank))
    return images.contiguous(memory_format=torch.channels_last)


@scenario(MPI_2)
def memory_layouts() -> None:
    # channels_last kernels and a transposed parameter: gradients that are not contiguous, which stock Horovod refuses.
    def make() -> Any:
        model: Any = _Convolutions()
        return model.to(memory_format=torch.channels_last)

    model, _ = assert_trains_as_one(make, lambda one, step, rank: 10.0 * one(_images(step, rank)), momentum=0.9)
    layouts = {name: parameter.grad.is_contiguous() for name, parameter in model.named_parameters()}
    assert not layouts["second.weight"] and not layouts["mixed"], "the scenario tests nothing: gradients are contiguous"


class _Embedded(nn.Module):
    """An embedding with sparse gradients, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(60, 20, sparse=True)
        self.out = nn.Linear(20, 30)

    def forward(self, words: torch.Tensor | None) -> torch.Tensor:
        if words is None:
            return self.out(torch.ones(2, 20)).square().mean()
        return self.out(self.embedding(words)).square().mean()


def _words(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 60, (8,), generator=torch.Generator().manual_seed(100 * step + rank))


def _train_embedded(model: nn.Module, optimizer: Any, absent: Any = lambda step, rank: False) -> None:
    for step in range(6):
        optimizer.zero_grad()
        words = None if absent(step, hvd.rank()) else _words(step, hvd.rank())
        (5.0 * model(words)).backward()
        optimizer.step()


@scenario(*EVERYWHERE, cases={"sparse": (False,), "sparse_as_dense": (True,)})
def embeddings(sparse_as_dense: bool) -> None:
    dense, sparse = _Embedded(), _Embedded()
    _train_embedded(dense, wrap(dense, hvd.Compression.none, momentum=0.0, sparse_as_dense=sparse_as_dense))
    _train_embedded(sparse, wrap(sparse, NoOp(), momentum=0.0, sparse_as_dense=sparse_as_dense))
    assert sparse.embedding.weight.grad.is_sparse
    assert_close(sparse, dense)
    assert_identical(sparse)
    selective = _Embedded()
    compression = SIDCo(0.1, warmup=None)
    _train_embedded(selective, wrap(selective, compression, momentum=0.0, sparse_as_dense=sparse_as_dense))
    assert ("embedding.weight" in compression.state_dict()["residuals"]) == sparse_as_dense
    assert_identical(selective)


@scenario(
    *EVERYWHERE,
    cases={
        f"{when}-{'sparse_as_dense' if as_dense else 'sparse'}": (absent, as_dense)
        for when, absent in {
            "first_step": lambda step, rank: step == 0 and rank == 1,
            "rank_0_later": lambda step, rank: step in (2, 3) and rank == 0,
            "everywhere_later": lambda step, rank: step == 3,
            "rank_1_always": lambda step, rank: rank == 1,
        }.items()
        for as_dense in (False, True)
    },
)
def embedding_without_gradient(absent: Any, as_dense: bool) -> None:
    # On one rank or on all the embedding is not used in some steps.
    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return 5.0 * model(None if absent(step, rank) else _words(step, rank))

    assert_trains_as_one(_Embedded, loss, sparse_as_dense=as_dense)


@scenario(*MPI)
def a_state_that_does_not_fit_the_embeddings_raises_on_all() -> None:
    # When it is loaded nobody knows that gradients will be sparse, of which there are no residuals.
    first, compression = _Embedded(), TopK(0.1, warmup=None)
    _train_embedded(first, wrap(first, compression, momentum=0.0), lambda step, rank: step == 0)
    second, resumed = _Embedded(), TopK(0.1, warmup=None)
    optimizer = wrap(second, resumed, momentum=0.0)
    if hvd.rank() == 1:
        resumed.load_state_dict(compression.state_dict())
    second(_words(0, hvd.rank())).backward()
    message = raised(ValueError, optimizer.step)
    assert "problem" in message and "unexpected: ['embedding.weight']" in message
    optimizer.zero_grad()
    second(_words(0, hvd.rank())).backward()
    resumed.reset()
    optimizer.step()
    _train_embedded(second, optimizer)
    assert_identical(second)


@scenario(MPI_2)
def sparse_gradients_with_corrected_momentum_are_refused() -> None:
    for as_dense in (False, True):
        model = _Embedded()
        optimizer = wrap(model, DGC(0.1, momentum=0.9, warmup=None), momentum=0.0, sparse_as_dense=as_dense)
        model(_words(0, hvd.rank())).backward()
        if as_dense:
            optimizer.step()
        else:
            assert "pass sparse_as_dense=True" in raised(ValueError, optimizer.step)
