"""Scenarios: a `StatsLog` of each rank, called in the ways in which a step can end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

import horovod_sparse.torch as sparse
from horovod_sparse import numpy as arrays

from . import logged
from .common import everyone, loss_of, small_model, train, wrap
from .logged import STEPS
from .scenario import EVERYWHERE, MPI, scenario

Source = Any


def _as_hook(path: Path) -> Source:
    # PyTorch calls such a hook twice in each step of Horovod's optimizer, because its class has a base with a `step`.
    model, compression = small_model(), sparse.SIDCo(0.05, warmup=None)
    optimizer = wrap(model, compression)
    optimizer.register_step_post_hook(sparse.StatsLog(compression, path, every=2))
    train(model, optimizer, range(STEPS))
    return compression


def _with_scaler(path: Path) -> Source:
    model, compression = small_model(), sparse.SIDCo(0.05, warmup=None)
    optimizer, scaler = wrap(model, compression), torch.amp.GradScaler("cpu", init_scale=2.0**7)
    compression.scale_with(scaler)
    log = sparse.StatsLog(compression, path, every=2)
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        # A step that overflows on one rank is left out on all.
        overflows = (step, hvd.rank()) == (3, 1)
        scaler.scale(loss_of(model, step) * (float("inf") if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        log()
    return compression


def _local_updates(path: Path) -> Source:
    model, compression = small_model(), sparse.SIDCo(0.05, warmup=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    local = sparse.LocalUpdates(optimizer, model, compression, every=3)
    log = sparse.StatsLog(local.compression, path, every=2)
    for step in range(3 * STEPS):
        local.zero_grad()
        loss_of(model, step).backward()
        local.step()
        log()
    return compression


def _arrays(path: Path) -> Source:
    import mpi4py.MPI

    reduce = arrays.SparseAllreduce(mpi4py.MPI.COMM_WORLD, arrays.SIDCo(0.05, warmup=None))
    log = arrays.StatsLog(reduce, path, every=2)
    for step in range(STEPS):
        generator = np.random.default_rng((step, hvd.rank()))
        reduce({"weight": generator.laplace(size=4000).astype(np.float32), "bias": np.ones(9, np.float32)})
        log()
    return reduce


@scenario(*EVERYWHERE, cases={"hook": (_as_hook,), "scaler": (_with_scaler,), "local updates": (_local_updates,)})
def a_log_has_every_second_step(run: Any) -> None:
    logged.check(run, hvd.rank(), everyone)


@scenario(*MPI)
def a_log_of_arrays_has_every_second_step() -> None:
    logged.check(_arrays, hvd.rank(), everyone)
