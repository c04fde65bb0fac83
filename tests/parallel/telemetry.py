"""Scenarios: a `StatsLog` of each rank, called in the ways in which a step can end."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import horovod_sparse.torch as sparse

from .common import everyone, loss_of, small_model, train, wrap
from .scenario import EVERYWHERE, scenario

STEPS = 6


def _as_hook(path: Path, compression: Any) -> None:
    # PyTorch calls such a hook twice in each step of Horovod's optimizer, because its class has a base with a `step`.
    model = small_model()
    optimizer = wrap(model, compression)
    optimizer.register_step_post_hook(sparse.StatsLog(compression, path, every=2))
    train(model, optimizer, range(STEPS))


def _with_scaler(path: Path, compression: Any) -> None:
    model = small_model()
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


def _local_updates(path: Path, compression: Any) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    local = sparse.LocalUpdates(optimizer, model, compression, every=3)
    log = sparse.StatsLog(local.compression, path, every=2)
    for step in range(3 * STEPS):
        local.zero_grad()
        loss_of(model, step).backward()
        local.step()
        log()


@scenario(*EVERYWHERE, cases={"hook": (_as_hook,), "scaler": (_with_scaler,), "local updates": (_local_updates,)})
def a_log_has_every_second_step(run: Any) -> None:
    compression = sparse.SIDCo(0.05, warmup=None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stats.jsonl"
        run(path, compression)
        first, *lines = map(json.loads, path.read_text().splitlines())
    assert first["compressor"] == repr(compression)
    assert compression.stats().steps == compression.steps == STEPS
    assert [line["step"] for line in lines] == [2, 4, 6]
    # Everything is as the statistics say of the last step, and a rank's own.
    total = compression.stats().last.total
    for name in ("count", "bytes_sent", "residual_norm"):
        assert lines[-1][name] == getattr(total, name) > 0.0
    norms = everyone(total.residual_norm)
    assert len(set(norms)) == len(norms)
    assert all(0.0 < line["seconds"] < 60.0 for line in lines)
