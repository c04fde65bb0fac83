"""Scenario: a `StatsLog` as a hook of the optimizer beside `DistributedDataParallel`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from horovod_sparse.tools.report.log import read
from horovod_sparse.torch import SIDCo, StatsLog

from ..common import small_model
from ..scenario import TORCHRUN, scenario
from . import ranks
from .common import sgd, train, wrap


@scenario(*TORCHRUN)
def a_log_has_every_second_step() -> None:
    compression = SIDCo(0.05)
    model = wrap(small_model(), compression)
    optimizer = sgd(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"stats-{ranks.rank()}.jsonl"
        optimizer.register_step_post_hook(StatsLog(compression, path, every=2))
        train(model, optimizer, range(6))
        log = read(path)
    total = compression.stats().last.total
    assert log.column("step") == [2, 4, 6]
    assert log.lines[-1]["count"] == total.count > 0.0
    assert log.lines[-1]["residual_norm"] == total.residual_norm
    assert len(set(ranks.allgather_object(total.residual_norm))) == ranks.size()
