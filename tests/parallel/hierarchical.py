"""Scenarios: the workers of a host act as one worker. On one machine, two consecutive workers stand for a host."""

from __future__ import annotations

from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from stairs import Halving, dense_until

import horovod_sparse.torch as adapter

from .common import MakeCompression, raised, small_model, train, wrap
from .disagreement import a_state_of_another_step_on_one_rank_raises_on_all
from .exchange import nothing_is_lost
from .launch import Launch
from .policies import numpy_gives_the_same
from .scenario import MPI_2, MPI_4, scenario
from .states import what_was_saved_continues_bit_for_bit

COMPRESSORS: dict[str, MakeCompression] = {
    "SIDCo": partial(adapter.SIDCo, 0.01, exchange=adapter.Hierarchical(2), warmup=None),
    "RandomBlock": partial(adapter.RandomBlock, 0.01, exchange=adapter.Hierarchical(2), warmup=None),
    "packed": partial(
        adapter.TopK, 0.01, exchange=adapter.Hierarchical(2, between=adapter.Pairs("packed")), warmup=None
    ),
}


def _at_five_per_cent(library: Any, **settings: Any) -> Any:
    return library.TopK(0.05, exchange=library.Hierarchical(2), warmup=None, **settings)


LAWS: dict[str, tuple[Any, ...]] = {
    **{
        f"{name}-{granularity}": (nothing_is_lost, make, granularity, torch.float32)
        for name, make in COMPRESSORS.items()
        for granularity in ("layer", "model")
    },
    **{f"{name}-resumed": (what_was_saved_continues_bit_for_bit, make) for name, make in COMPRESSORS.items()},
    "numpy": (numpy_gives_the_same, _at_five_per_cent),
    "another-step-dense": (
        a_state_of_another_step_on_one_rank_raises_on_all,
        dense_until(3, COMPRESSORS["SIDCo"], hvd.size),
    ),
    "another-step": (
        a_state_of_another_step_on_one_rank_raises_on_all,
        partial(adapter.TopK, Halving(0.25, 0.01), exchange=adapter.Hierarchical(2)),
        (2, 3),
    ),
}


@scenario(MPI_4, Launch("horovodrun", 4), cases=LAWS)
def hosts_keep_the_laws_of_workers(law: Any, *arguments: Any) -> None:
    law(*arguments)


@scenario(MPI_2)
def one_host_is_refused() -> None:
    model = small_model()
    optimizer = wrap(model, adapter.TopK(0.01, exchange=adapter.Hierarchical(), warmup=None))
    message = raised(ValueError, lambda: train(model, optimizer, range(1)))
    assert "Hierarchical needs at least two hosts" in message and "use another exchange" in message, message
