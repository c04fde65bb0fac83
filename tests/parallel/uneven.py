"""Scenarios: uneven data. A rank whose data has ended is a rank whose steps have no gradients; no rank waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from torch import nn

from horovod_sparse.torch import DGC, Join, MiCRO, NoOp, SIDCo, TopK

from .common import (
    BUCKET_BYTES,
    COMPRESSORS,
    MakeCompression,
    assert_close,
    assert_identical,
    digest,
    everyone,
    kept,
    loss_of,
    overflowing,
    small_model,
    train,
    wrap,
)
from .scenario import EVERYWHERE, MPI_4, PAIR, scenario

STEPS = {2: (5, 2), 4: (2, 5, 0, 3)}
"""How many steps each rank has data for, by the number of ranks."""


def mine(steps: Mapping[int, Sequence[int]] = STEPS) -> int:
    return steps[hvd.size()][hvd.rank()]


def _all_of(optimizer: Any) -> list[str]:
    """Everything that training has changed: of the replicas, then of this rank."""
    state = optimizer.state_dict()
    tensors = [value for one in state["state"].values() for _, value in sorted(one.items()) if torch.is_tensor(value)]
    parameters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    return [digest(parameters), digest(tensors), str(rates), kept(optimizer._compression)]


class Training(NamedTuple):
    """A way to train, made anew for every run."""

    model: nn.Module
    optimizers: Sequence[Any]
    step: Callable[[int, bool], None]
    """step(number, has_data); without data a rank steps without gradients."""
    scaler: torch.amp.GradScaler | None = None


def _law(make: Callable[[], Training]) -> None:
    """A rank without data steps without gradients, bit by bit, also in the steps that follow."""
    results, most = [], max(STEPS[hvd.size()])
    for joins in (True, False):
        training = make()
        if joins:
            with Join(*training.optimizers) as join:
                for number in range(mine()):
                    training.step(number, True)
            assert join.last_rank == STEPS[hvd.size()].index(most)
        else:
            for number in range(most):
                training.step(number, number < mine())
        found = []
        for steps in (range(0), range(10, 13)):
            for number in steps:
                training.step(number, True)
            assert_identical(training.model)
            found += [_all_of(optimizer) for optimizer in training.optimizers]
            found.append([str(training.scaler and training.scaler.state_dict())])
        results.append(found)
    assert results[0] == results[1]


def _train(model: nn.Module, optimizer: Any, number: int, has_data: bool) -> None:
    optimizer.zero_grad()
    if has_data:
        loss_of(model, number).backward()
    optimizer.step()


_KINDS: dict[str, MakeCompression] = {
    **COMPRESSORS,
    "momentum": lambda **settings: DGC(0.02, warmup=None, **settings),
    "clipped_as_a_whole": lambda **settings: TopK(0.02, clip_norm=0.5, clip_scope="model", warmup=None, **settings),
    "in_units_of_the_update": lambda **settings: MiCRO(0.02, lr_in_residual=True, warmup=None, **settings),
    "warm-up": lambda **settings: SIDCo(0.02, **settings),
}


@scenario(*EVERYWHERE, cases={name: (make,) for name, make in _KINDS.items()})
def a_rank_without_data_steps_without_gradients(make: MakeCompression) -> None:
    """The learning rate changes in every step."""

    def training() -> Training:
        model = small_model()
        optimizer = wrap(model, make(bucket_bytes=BUCKET_BYTES), momentum=0.0)

        def step(number: int, has_data: bool) -> None:
            optimizer.param_groups[0]["lr"] = 0.05 * 0.8**number
            _train(model, optimizer, number, has_data)

        return Training(model, [optimizer], step)

    _law(training)


@scenario(*EVERYWHERE, cases={"SIDCo": (SIDCo,), "momentum": (DGC,)})
def a_loss_scaler_follows(make: Any) -> None:
    """Ranks without data skip the steps that overflow. The scale grows, and is the same on all ranks afterwards."""

    def training() -> Training:
        model, scaler = overflowing(), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        # A scaler makes its scale when it is first used.
        scaler.scale(torch.zeros(()))
        compression = make(0.02)
        optimizer = wrap(model, compression, momentum=0.0)
        compression.scale_with(scaler)

        def step(number: int, has_data: bool) -> None:
            model.overflows = number == 3
            optimizer.zero_grad()
            if has_data:
                scaler.scale(loss_of(model, number)).backward()
            scaler.step(optimizer)
            scaler.update()

        return Training(model, [optimizer], step, scaler)

    _law(training)


@scenario(*PAIR)
def several_optimizers_reduce_in_any_order() -> None:
    """One of them makes two steps where the other makes one."""

    def training() -> Training:
        model = small_model()
        halves = [list(model[:3].named_parameters()), list(model[3:].named_parameters(prefix="upper"))]
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD([parameter for _, parameter in half], lr=0.05),
                half,
                compression=SIDCo(0.02, warmup=None),
            )
            for half in halves
        ]

        def step(number: int, has_data: bool) -> None:
            turn = number % 3 // 2
            for place, half in enumerate(halves):
                for _, parameter in half:
                    parameter.requires_grad_(place == turn)
            _train(model, optimizers[turn], number, has_data)

        return Training(model, optimizers, step)

    _law(training)


_OPTIMIZERS: dict[str, Any] = {
    "Adam": partial(torch.optim.Adam, lr=1e-3, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
}


@scenario(
    *EVERYWHERE,
    cases={f"{name}-{dtype}": (make, dtype) for dtype in ("float32", "bfloat16") for name, make in _OPTIMIZERS.items()},
)
def the_state_of_the_optimizer_is_that_of_the_last_rank(make: Any, dtype: str) -> None:
    """Also of a rank that has had no data at all, and so has no state."""
    steps = {2: (0, 3), 4: (0, 3, 1, 3)}
    model = small_model(dtype=getattr(torch, dtype))
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), compression=SIDCo(0.02, warmup=None, updates=False)
    )
    for start in (0, 10):
        with Join(optimizer) as join:
            train(model, optimizer, range(start, start + mine(steps)))
        assert join.last_rank == 1
        replicas = _all_of(optimizer)[:3]
        assert everyone(replicas) == [replicas] * hvd.size()
    with Join(optimizer) as join:
        train(model, optimizer, range(20, 22))
    assert join.last_rank == 0
    replicas = _all_of(optimizer)[:3]
    assert everyone(replicas) == [replicas] * hvd.size()


@scenario(*EVERYWHERE)
def everything_sent_is_what_stock_join_does() -> None:
    """Averages are over all ranks, also over those that have joined."""
    stock, model = small_model(), small_model()
    dense = wrap(stock, hvd.Compression.none)
    train(stock, dense, range(mine()))
    last = hvd.join()
    hvd.broadcast_parameters(stock.state_dict(), root_rank=last)
    optimizer = wrap(model, NoOp())
    with Join(optimizer):
        train(model, optimizer, range(mine()))
    assert_identical(model)
    assert_close(model, stock)


@scenario(*PAIR, cases={"sparse": (False,), "sparse_as_dense": (True,)})
def embeddings_work(as_dense: bool) -> None:
    """A rank without any data learns from the others that there are sparse gradients."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(60, 20, sparse=True), nn.Linear(20, 30))
    optimizer = wrap(model, TopK(0.1, warmup=None), momentum=0.0, sparse_as_dense=as_dense)
    with Join(optimizer):
        for step in range(3 if hvd.rank() == 0 else 0):
            optimizer.zero_grad()
            model(torch.tensor([step, 5])).square().mean().backward()
            optimizer.step()
    assert_identical(model)


@scenario(MPI_4)
def ranks_of_a_process_set_join() -> None:
    pair = hvd.add_process_set([1, 3])
    model = small_model()
    optimizer = wrap(model, SIDCo(0.02, warmup=None), process_set=pair)
    with Join(optimizer) as join:
        train(model, optimizer, range(4 if hvd.rank() == 3 else 2))
    digests = everyone(digest(model.parameters()))
    assert digests[1] == digests[3]
    assert join.last_rank == (3 if pair.included() else 0)
    hvd.remove_process_set(pair)
