"""Detached error feedback within a block: parameters move by what waits, and are back, bit by bit, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.torch import TopK, register
from horovod_sparse.torch.ahead import Ahead

ETA, COEFFICIENT = 0.25, 0.5


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5))


def values(model: nn.Module) -> list[torch.Tensor]:
    return [one.detach().clone() for one in model.parameters()]


def waiting(parameters: Any) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """For all but the last parameter."""
    return [(one, torch.arange(float(one.numel())).view_as(one), ETA) for one in [*parameters.values()][:-1]]


def block(model: nn.Module, ahead: Ahead) -> Any:
    return ahead.block(dict(model.named_parameters()), COEFFICIENT, waiting)


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(one, other) for one, other in zip(some, others, strict=True)]


def test_parameters_move_within_the_block_alone() -> None:
    """Backward takes no notice of it."""
    model, ahead = make_model(), Ahead()
    before, last = values(model), len([*model.parameters()]) - 1
    for _ in range(2):
        with block(model, ahead):
            for number, (now, was) in enumerate(zip(values(model), before, strict=True)):
                e = torch.zeros_like(was) if number == last else torch.arange(float(was.numel())).view_as(was)
                torch.testing.assert_close(now, was - COEFFICIENT * ETA * e, rtol=1e-6, atol=1e-5)
            model(torch.ones(2, 20)).sum().backward()
        assert all(equal(values(model), before))
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_within_the_block_moves_them_back_too(error: type[BaseException]) -> None:
    model, ahead = make_model(), Ahead()
    before = values(model)
    with pytest.raises(error), block(model, ahead):
        raise error
    assert all(equal(values(model), before))

    def fails(parameters: Any) -> Any:
        for one in waiting(parameters):
            yield one
            raise error

    with pytest.raises(error), ahead.block(dict(model.named_parameters()), COEFFICIENT, fails):
        pytest.fail("it does not begin")
    assert all(equal(values(model), before))


def test_writing_to_parameters_within_the_block_is_refused() -> None:
    model = make_model()
    before, optimizer = values(model), torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 20)).sum().backward()
    refused = pytest.raises(RuntimeError, match=r"parameters must not .*compression\.ahead")
    with refused, block(model, Ahead()):
        optimizer.step()
    assert equal(values(model), before) == [True, True, True, False], "the last one has not been moved"


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOROVOD_SPARSE_FORCE", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*all_gather:FutureWarning")
@pytest.mark.parametrize("lr_in_residual", [False, True])
def test_a_model_moves_by_its_residual_and_the_rate_of_its_optimizer(lr_in_residual: bool) -> None:
    """With the rate in the residual, by the residual alone. A frozen parameter stays."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=ETA)
    compression = TopK(0.1, min_numel=0, lr_in_residual=lr_in_residual, warmup=None)
    register(model, compression, optimizer)
    names = [name for name, _ in model.module.named_parameters()]
    for step in range(3):
        before = values(model)
        residuals = compression.state_dict()["residuals"] if step else {}
        with compression.ahead(model, COEFFICIENT):
            for name, now, was in zip(names, values(model), before, strict=True):
                e = residuals.get(name, torch.zeros_like(was))
                assert step == 0 or e.any()
                eta = 1.0 if lr_in_residual else ETA
                torch.testing.assert_close(now, was - COEFFICIENT * eta * e, rtol=1e-6, atol=1e-7)
            model(torch.ones(2, 20)).square().sum().backward()
        assert all(equal(values(model), before))
        optimizer.step()
        optimizer.zero_grad()
    frozen = model.module[1].weight.requires_grad_(False)
    was = frozen.detach().clone()
    with compression.ahead(model.module, COEFFICIENT):
        assert torch.equal(frozen, was) and not all(equal(values(model), before))


@pytest.mark.usefixtures("group")
def test_what_is_refused() -> None:
    model, compression = DistributedDataParallel(make_model()), TopK(0.1, warmup=None)
    with compression.ahead(model, COEFFICIENT):
        "It serves nothing yet."
    register(model, compression)
    for coefficient in (-0.1, 1.5, "0.5"):
        block: Any = compression.ahead(model, coefficient)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=rf"coefficient must be in \[0, 1\], got {coefficient!r}"):
            block.__enter__()
    block = compression.ahead(model, COEFFICIENT)
    with pytest.raises(ValueError, match=r"optimizer must be given, .* call register\(model, compression, optimizer\)"):
        block.__enter__()
