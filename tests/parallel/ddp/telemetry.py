"""Scenario: a `StatsLog` as a hook of the optimizer beside `DistributedDataParallel`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from horovod_sparse.torch import SIDCo, StatsLog

from .. import logged
from ..common import small_model
from ..scenario import TORCHRUN, scenario
from . import ranks
from .common import sgd, train, wrap


def _as_hook(path: Path) -> Any:
    compression = SIDCo(0.05, warmup=None)
    model = wrap(small_model(), compression)
    optimizer = sgd(model)
    optimizer.register_step_post_hook(StatsLog(compression, path, every=2))
    train(model, optimizer, range(logged.STEPS))
    return compression


@scenario(*TORCHRUN)
def a_log_has_every_second_step() -> None:
    logged.check(_as_hook, ranks.rank(), ranks.allgather_object)
