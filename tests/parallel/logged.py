"""What a `StatsLog` must hold after six steps of which it writes every second one. Imports no framework."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod_sparse.tools.report import Log

STEPS = 6


def check(run: Callable[[Path], Any], rank: int, everyone: Callable[[Any], list[Any]]) -> None:
    """`run` trains with a log at a path, and returns what it logs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"stats-{rank}.jsonl"
        source = run(path)
        log = Log(path)
    assert [*log.compressors] == [repr(source)]
    assert source.stats().steps == source.steps == STEPS
    assert log.column("step") == [2, 4, 6]
    # Everything is as the statistics say of the last step, and a rank's own.
    total = source.stats().last.total
    assert log.lines[-1]["count"] == total.count > 0.0
    assert log.lines[-1]["bytes_sent"] == total.bytes_sent > 0.0
    assert log.lines[-1]["residual_norm"] == total.residual_norm
    assert log.total("bytes_sent") == STEPS * total.bytes_sent
    norms = everyone(total.residual_norm)
    assert len(set(norms)) == len(norms)
    assert all(0.0 < value < 60.0 for value in log.column("seconds"))
