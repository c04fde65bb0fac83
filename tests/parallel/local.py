"""Scenarios: local updates over Horovod and `torch.distributed`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

import horovod_sparse.torch as sparse
from horovod_sparse.compressors import TopK
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.dense import DenseBucket
from horovod_sparse.torch import transport

from .common import Oracle, assert_identical, everyone, hvd, normals, raised, small_model, wrap
from .scenario import EVERYWHERE, MPI_2, PAIR, TORCHRUN, TORCHRUN_2, scenario

SHAPES: dict[str, Sequence[int]] = {"first": (40, 50), "second": (3000,), "small": (30,)}
EVERY = 3

Moved = Mapping[str, np.ndarray]


class Given(torch.optim.Optimizer):
    """Moves every parameter by what its gradient is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter += parameter.grad


def make(compression: Any, **settings: Any) -> tuple[dict[str, np.ndarray], Callable[[Moved], None], Any]:
    """Return views of parameters, what moves them by arrays, and local updates."""
    model = nn.Module()
    for name, shape in SHAPES.items():
        model.register_parameter(name, nn.Parameter(torch.zeros(tuple(shape))))
    local = sparse.LocalUpdates(Given(model.parameters(), {}), model, compression, **settings)

    def move(by: Moved) -> None:
        for name, one in by.items():
            getattr(model, name).grad = torch.from_numpy(one).clone()
        local.step()

    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}, move, local


def moves(step: int, rank: int | None = None) -> dict[str, np.ndarray]:
    """How a worker's parameters move in a local step: this one's, or another one's."""
    rank = hvd.rank() if rank is None else rank
    return {name: 0.01 * normals(shape, step=step, rank=rank) for name, shape in SHAPES.items()}


def formulas(decay: float, outer_lr: float, momentum: float) -> None:
    """Every exchange is what the formulas give with the NumPy pipelines of all workers."""
    compressed = [name for name in SHAPES if name != "small"]
    arguments: dict[str, Any] = {"ratio": 0.05, "granularity": 16_000}
    settings = {"every": EVERY, "residual_decay": decay, "outer_lr": outer_lr, "outer_momentum": momentum}
    parameters, move, _ = make(sparse.TopK(**arguments), **settings)
    oracle = Oracle(TopK(**arguments), {name: SHAPES[name] for name in compressed}, hvd.size())
    shared = {name: one.copy() for name, one in parameters.items()}
    velocity = {name: np.zeros_like(one) for name, one in shared.items()}
    for outer in range(5):
        for step in range(EVERY):
            move(moves(EVERY * outer + step))
        drifts = []
        for rank in range(hvd.size()):
            mine = {name: one.copy() for name, one in shared.items()}
            for step in range(EVERY):
                for name, by in moves(EVERY * outer + step, rank).items():
                    mine[name] += by
            drifts.append({name: shared[name] - mine[name] for name in SHAPES})
        means = oracle.reduce([{name: drift[name] for name in compressed} for drift in drifts])
        means["small"] = np.stack([one["small"] for one in drifts]).mean(axis=0, dtype=np.float32)
        for pipeline in oracle.pipelines:
            for name in compressed:
                pipeline.residuals.view(name)[:] *= np.float32(decay)
        for name, mean in means.items():
            velocity[name] = np.float32(momentum) * velocity[name] + mean
            shared[name] = shared[name] - np.float32(outer_lr) * (mean + np.float32(momentum) * velocity[name])
            np.testing.assert_allclose(parameters[name], shared[name], rtol=1e-5, atol=1e-6, err_msg=f"{name}, {outer}")
            # Rounding must not choose other entries in later steps.
            shared[name] = parameters[name].copy()
        assert_identical(map(torch.from_numpy, parameters.values()))


def a_resumed_run_goes_on_bit_for_bit() -> None:
    """Also between two exchanges."""
    (parameters, move, local), (twin, twin_move, twin_local) = (
        make(sparse.SIDCo(0.05), every=EVERY, outer_momentum=0.5) for _ in range(2)
    )
    for step in range(4 * EVERY + 1):
        move(moves(step))
    assert local.state_dict()["shared"]["first"].any()
    twin_local.load_state_dict(local.state_dict())
    for name, parameter in parameters.items():
        twin[name][...] = parameter
    for step in range(4 * EVERY + 1, 7 * EVERY):
        move(moves(step))
        twin_move(moves(step))
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(twin[name], parameter)


def what_is_not_finite_raises_on_all_and_training_goes_on() -> None:
    parameters, move, local = make(sparse.TopK(0.05), every=1)
    move(moves(0))
    kept = str(local.state_dict())
    before = {name: one.copy() for name, one in parameters.items()}
    bad = moves(1)
    if hvd.rank() == 1:
        bad["first"][3, 4] = np.nan
    raised(FloatingPointError, lambda: move(bad))
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(parameter, before[name])
    assert str(local.state_dict()) == kept
    for step in range(2, 5):
        move(moves(step))
    assert_identical(map(torch.from_numpy, parameters.values()))


def other_beginnings_raise_on_all() -> None:
    """Other values, or other settings."""
    for change in ({}, {"outer_lr": 1.0 + hvd.rank()}):
        _, move, local = make(sparse.TopK(0.05), **{"every": 1, **change})
        if not change:
            move(moves(0, 0))
            state = local.state_dict()
            state["shared"]["second"][7] += hvd.rank()
            local.load_state_dict(state)
        text = raised(ValueError, lambda move=move: move(moves(1)))
        assert "shared parameters" in text or "local updates" in text, text


def exchanges_in_another_order_raise_on_all(met: bool) -> None:
    """Also where one worker has made more of them. Two that begin alike are told apart at the second."""
    made = [make(sparse.TopK(0.05))[2] for _ in range(2 + hvd.rank())][-2:]
    if met:
        for local in made:
            local.synchronize()
    text = raised(ValueError, lambda: [local.synchronize() for local in made[:: 1 if hvd.rank() else -1]])
    assert "local updates" in text, text


LAWS: dict[str, tuple[Any, ...]] = {
    "formulas": (formulas, 0.95, 1.0, 0.0),
    "formulas-outer": (formulas, 0.9, 0.7, 0.5),
    "resumed": (a_resumed_run_goes_on_bit_for_bit,),
    "another-order": (exchanges_in_another_order_raise_on_all, True),
    "another-order-at-first": (exchanges_in_another_order_raise_on_all, False),
    "other-beginnings": (other_beginnings_raise_on_all,),
    "not-finite": (what_is_not_finite_raises_on_all_and_training_goes_on,),
}


@scenario(*EVERYWHERE, *TORCHRUN, cases=LAWS)
def local_updates(law: Any, *arguments: Any) -> None:
    law(*arguments)


def _interrupt(owner: Any, name: str, call: int) -> Any:
    """On worker 1, let a call of a method be interrupted."""
    method, calls = getattr(owner, name), itertools.count(1)

    def called(*arguments: Any, **named: Any) -> Any:
        if next(calls) == call and hvd.rank() == 1:
            raise KeyboardInterrupt
        return method(*arguments, **named)

    return mock.patch.object(owner, name, called)


PLACES = {
    "first": ("check_real", 1),
    "begins": ("start_step", 1),
    "one-started": ("begin", 2),
    "one-complete": ("advance", 2),
    "dense": ("conclude", 1),
}
"""Where an exchange is interrupted: a function, and which of its calls."""


@scenario(
    *EVERYWHERE,
    cases={
        f"{exchange.title}-{place}": (exchange, place)
        for exchange in (sparse.Pairs(), sparse.Balanced())
        for place in PLACES
    },
)
def an_exchange_that_raises_on_one_worker_raises_on_all_and_leaves_no_trace(exchange: Any, place: str) -> None:
    (mine, move, local), (calm, move_calmly, undisturbed) = (
        make(sparse.TopK(0.05, granularity=4000, exchange=exchange), every=100) for _ in range(2)
    )
    for step in range(4):
        move(moves(step))
        move_calmly(moves(step))
        if step == (0 if place == "first" else 2):
            owners = {"first": transport, "one-started": Bucket, "dense": DenseBucket}
            owner = owners.get(place, local.compression.store.pipeline)
            with _interrupt(owner, *PLACES[place]):
                text = raised(KeyboardInterrupt if hvd.rank() == 1 else RuntimeError, local.synchronize)
            assert hvd.rank() == 1 or "worker 1 of its group has given up this exchange" in text, text
        local.synchronize()
        undisturbed.synchronize()
    for name, parameter in calm.items():
        np.testing.assert_array_equal(mine[name], parameter)


@scenario(*PAIR)
def a_worker_that_fails_when_the_others_are_done_is_noticed() -> None:
    _, move, local = make(sparse.TopK(0.05), every=100)
    local.synchronize()
    move(moves(0))
    with _interrupt(local.compression.store.pipeline, "end_step", 1):
        if hvd.rank() == 1:
            raised(KeyboardInterrupt, local.synchronize)
        else:
            local.synchronize()
    assert "shared parameters" in raised(ValueError, local.synchronize)


@scenario(MPI_2)
def an_optimizer_of_horovod_is_refused() -> None:
    model = small_model()
    optimizer = wrap(model, hvd.Compression.none)
    assert "leave hvd.DistributedOptimizer out" in raised(TypeError, lambda: sparse.LocalUpdates(optimizer, model))


@scenario(TORCHRUN_2)
def a_scaler_belongs_to_its_worker() -> None:
    torch.manual_seed(0)
    model = nn.Linear(30, 40)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    local = sparse.LocalUpdates(optimizer, model, sparse.TopK(0.1, min_numel=0, warmup=None), every=3)
    for step in range(6):
        local.zero_grad()
        loss = model(torch.ones(1, 30)).sum() * (float("inf") if (step, hvd.rank()) == (1, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        local.count_step()
    assert local.compression.stats().steps == 2
    assert_identical(model)
    assert everyone(scaler.get_scale()) == [2.0**10, 2.0**9]
    assert "scaler.step(optimizer)" in raised(RuntimeError, lambda: scaler.step(local))  # type: ignore[arg-type]
    assert "scaler.step(optimizer)" in raised(RuntimeError, lambda: local.compression.scale_with(scaler))


@scenario(TORCHRUN_2, cases={"bfloat16": (torch.bfloat16,), "float16": (torch.float16,)})
def half_precision_keeps_what_was_too_small_to_see(dtype: torch.dtype) -> None:
    """Each exchange moves the shared parameters by less than half of a unit of the parameters' type."""
    model = nn.Linear(40, 50, bias=False).to(dtype)
    nn.init.ones_(model.weight)

    class Alternating(torch.optim.Optimizer):
        """Moves the parameters of worker 0 alone, by the smallest step that their type can make."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            model.weight += torch.finfo(dtype).eps * (hvd.rank() == 0)

    local = sparse.LocalUpdates(Alternating(model.parameters(), {}), model, every=1, residual_decay=1.0, outer_lr=0.5)
    for exchanges in range(1, 9):
        local.step()
        expected = torch.tensor(1.0 + exchanges * torch.finfo(dtype).eps / 4).to(dtype)
        assert torch.equal(model.weight, expected.expand(50, 40)), exchanges
    assert_identical(model)


@scenario(TORCHRUN_2)
def parameters_that_one_worker_adds_raise_on_all() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    local = sparse.LocalUpdates(optimizer, model)
    if hvd.rank() == 1:
        optimizer.add_param_group({"params": [model.bias]})
    assert "make it again after parameters were added" in raised(ValueError, local.synchronize)


@scenario(TORCHRUN_2)
def wrong_settings_are_refused() -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    for arguments, text in (
        ({"every": 0}, "every must be a whole number of steps >= 1, got 0"),
        ({"residual_decay": 0.0}, "residual_decay must be in"),
        ({"outer_lr": float("inf")}, "outer_lr must be a finite number"),
        ({"outer_momentum": 1.0}, "outer_momentum must be in"),
        ({"optimizer": other}, "optimizer must have parameters of the model only, got 1 others"),
        ({"compression": sparse.DGC(0.1, momentum=0.9)}, "compression must have momentum=None"),
        (
            {"compression": sparse.TopK(0.1, lr_in_residual=True, warmup=None)},
            "compression must have lr_in_residual=False",
        ),
        ({"compression": sparse.TopK(0.1, clip=1.0, warmup=None)}, "compression must have clip=None"),
        ({"compression": "TopK"}, "got 'TopK'"),
        ({"optimizer": model, "model": optimizer}, "LocalUpdates(optimizer, model, compression), got Linear and AdamW"),
        ({"model": nn.Sequential(nn.parallel.DistributedDataParallel(model))}, "leave DistributedDataParallel out"),
    ):
        settings = {"optimizer": optimizer, "model": model, **arguments}
        assert text in raised((TypeError, ValueError), lambda settings=settings: sparse.LocalUpdates(**settings))
