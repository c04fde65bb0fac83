"""Scenarios: local updates over Horovod."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import horovod.torch as hvd
import numpy as np

import horovod_sparse.torch as sparse
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.torch import transport

from . import local_laws
from .common import everyone, raised, small_model, wrap
from .scenario import EVERYWHERE, MPI_2, PAIR, scenario


@scenario(*EVERYWHERE, cases=local_laws.LAWS)
def local_updates(law: Any, *arguments: Any) -> None:
    make = local_laws.torch_maker(sparse)
    law(local_laws.Workers(hvd.rank(), hvd.size(), everyone, make), *arguments)


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
    "dense": ("finish_dense", 1),
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
        local_laws.torch_maker(sparse)("TopK", {"ratio": 0.05, "granularity": 4000, "exchange": exchange}, every=100)
        for _ in range(2)
    )
    for step in range(4):
        move(local_laws.moves(step, hvd.rank()))
        move_calmly(local_laws.moves(step, hvd.rank()))
        if step == (0 if place == "first" else 2):
            owner = {"first": transport, "one-started": Bucket}.get(place, local.compression.store.pipeline)
            with _interrupt(owner, *PLACES[place]):
                text = raised(KeyboardInterrupt if hvd.rank() == 1 else RuntimeError, local.synchronize)
            assert hvd.rank() == 1 or "worker 1 of its group has given up this exchange" in text, text
        local.synchronize()
        undisturbed.synchronize()
    for name, parameter in calm.items():
        np.testing.assert_array_equal(mine[name], parameter)


@scenario(*PAIR)
def a_worker_that_fails_when_the_others_are_done_is_noticed() -> None:
    _, move, local = local_laws.torch_maker(sparse)("TopK", {"ratio": 0.05}, every=100)
    local.synchronize()
    move(local_laws.moves(0, hvd.rank()))
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
