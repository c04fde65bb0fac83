"""Scenarios: objects that libraries put around an optimizer, whose class derives from that of the optimizer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

from horovod_sparse.torch import SIDCo

from .common import BUCKET_BYTES, assert_identical, closure_of, digest, kept, loss_of, raised, small_model, train, wrap
from .scenario import MPI_2, PAIR, scenario


class Around:
    """Has the class of an optimizer, but none of its state: Lightning and Fabric wrap optimizers like this."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Around" + type(optimizer).__name__, (Around, type(optimizer)), {})

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def _renamed(optimizer: Any) -> Any:
    """The optimizer itself, of a class that derives from its own."""
    optimizer.__class__ = type("Renamed", (type(optimizer),), {})
    return optimizer


WRAPPERS: dict[str, tuple[Callable[[Any], Any]]] = {"around": (Around,), "renamed": (_renamed,)}


def _compression() -> SIDCo:
    return SIDCo(0.05, granularity=BUCKET_BYTES, warmup=None)


def _train_in_all_ways(model: nn.Module, optimizer: Any) -> None:
    train(model, optimizer, range(3))
    for step in (3, 4):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, step).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()

    assert optimizer.step(closure_of(model, optimizer, 5)) > 0.0
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 6)).backward()
    scaler.step(optimizer)
    optimizer.set_backward_passes_per_step(2)
    optimizer.zero_grad()
    for step in (7, 8):
        loss_of(model, step).backward()
    assert "before optimizer.step()" in raised(AssertionError, optimizer.zero_grad)
    optimizer.step()


@scenario(*PAIR, cases=WRAPPERS)
def a_wrapped_optimizer_does_as_the_optimizer_itself(wrapper: Callable[[Any], Any]) -> None:
    models, compressions = (small_model(), small_model()), (_compression(), _compression())
    plain, inner = (wrap(model, compression) for model, compression in zip(models, compressions, strict=True))
    _train_in_all_ways(models[0], plain)
    _train_in_all_ways(models[1], wrapper(inner))
    assert digest(models[0].parameters()) == digest(models[1].parameters())
    assert kept(compressions[0]) == kept(compressions[1])
    assert_identical(models[1])


@scenario(MPI_2, cases=WRAPPERS)
def a_wrapped_optimizer_takes_parameters_and_scaler(wrapper: Callable[[Any], Any]) -> None:
    models = small_model(), small_model()
    optimizers = []
    for number, model in enumerate(models):
        *first, last = model
        sgd = torch.optim.SGD(nn.Sequential(*first).parameters(), lr=0.05)
        optimizer = hvd.DistributedOptimizer(sgd, compression=_compression())
        optimizers.append(wrapper(optimizer) if number else optimizer)
        optimizers[number].add_param_group({"params": list(last.parameters()), "lr": 0.02})
    for model, optimizer in zip(models, optimizers, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            scaler.scale(loss * float("inf") if step == 1 and hvd.rank() == 1 else loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0
    assert digest(models[0].parameters()) == digest(models[1].parameters())
    assert_identical(models[1])


@scenario(MPI_2)
def libraries_that_clip_need_synchronize_alone() -> None:
    """They step without `skip_synchronize`, as stock Horovod warns, or clip within a closure. Nothing is reduced twice."""
    models = [small_model() for _ in range(3)]
    known, stepping, closing = (wrap(model, _compression()) for model in models)

    def clipped(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            clipped(models[0], known, step)
            with known.skip_synchronize():
                known.step()
            clipped(models[1], stepping, step)
            with pytest.warns(UserWarning, match=r"optimizer\.skip_synchronize"):
                stepping.step()
            closing.step(lambda step=step: clipped(models[2], closing, step))
    assert len({digest(model.parameters()) for model in models}) == 1
    assert_identical(models[0])


@scenario(MPI_2)
def a_wrapped_optimizer_with_dense_gradients_takes_parameters() -> None:
    """Stock Horovod has no `add_param_group` of its own, so ours must not disturb a wrapper of its optimizers."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = wrap(small_model(), hvd.Compression.none)
    Around(optimizer).add_param_group({"params": [parameter]})
    assert optimizer.param_groups[-1]["params"] == [parameter]
