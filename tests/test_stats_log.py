"""`StatsLog` in one process, with NumPy; in training: parallel/training.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_sparse import __version__
from horovod_sparse.contrib import stats_log
from horovod_sparse.core.statistics import NO_STATS, Stats
from horovod_sparse.numpy import SIDCo, SparseAllreduce, StatsLog, TopK


class Scalars:
    """A writer that keeps what it gets."""

    def __init__(self) -> None:
        self.given: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int, /) -> None:
        self.given.append((name, value, step))


def reduction(**settings: Any) -> SparseAllreduce:
    return SparseAllreduce(None, SIDCo(0.05, warmup=None, **settings))


def train(reduce: SparseAllreduce, log: StatsLog, steps: int) -> None:
    for step in range(steps):
        reduce({"weight": np.random.default_rng(step).laplace(size=2000).astype(np.float32), "bias": np.ones(7)})
        log()


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_lines_hold_what_stats_says(tmp_path: Path) -> None:
    """And the writer gets the same."""
    path, scalars = tmp_path / "stats.jsonl", Scalars()
    reduce = reduction()
    log = StatsLog(reduce, path, writer=scalars, every=3)
    train(reduce, log, 6)
    last = reduce.stats().last
    train(reduce, log, 2)
    first, *written = lines(path)
    assert first == {"package": __version__, "compressor": repr(reduce), "step": 0}
    assert "SIDCo(" in first["compressor"] and "ratio=0.05" in first["compressor"]
    assert [line["step"] for line in written] == [3, 6]
    numbers = [(name, value, line["step"]) for line in written for name, value in line.items()]
    assert scalars.given == [
        (f"horovod_sparse/{name}", *rest) for name, *rest in numbers if name not in ("step", "exchange")
    ]
    seconds = written[-1].pop("seconds")
    assert 0.0 < seconds < 60.0
    names = {*written[-1]} - {"step", "dense_bytes_sent", "exchange"}
    assert names >= {"numel", "count", "ratio", "bytes_sent", "residual_norm"}
    expected = {name: getattr(last.total, name) for name in names}
    expected |= {"step": 6, "dense_bytes_sent": last.dense_bytes_sent, "exchange": last.total.exchange}
    assert written[-1] == expected
    assert written[-1]["residual_norm"] > 0.0 and 0.0 < written[-1]["ratio"] < 0.1


def test_what_there_is_not_is_null(tmp_path: Path) -> None:
    # Top-k has no threshold, and the first step no time since the one before.
    path, scalars = tmp_path / "stats.jsonl", Scalars()
    reduce = SparseAllreduce(None, TopK(0.1, warmup=None))
    train(reduce, StatsLog(reduce, path, writer=scalars, every=1), 1)
    (line,) = lines(path)[1:]
    assert math.isnan(reduce.stats().last.total.threshold)
    assert line["threshold"] is None and line["seconds"] is None
    assert {name for name, *_ in scalars.given}.isdisjoint({"horovod_sparse/threshold", "horovod_sparse/seconds"})


class Clock:
    """A compressor that only counts, on a clock of its own. Its statistics take 100 seconds."""

    def __init__(self) -> None:
        self.now, self.steps = 0.0, 0

    def stats(self) -> Stats:
        self.now += 100.0
        return NO_STATS


def test_a_call_counts_what_was_exchanged_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, scalars = Clock(), Scalars()
    monkeypatch.setattr(stats_log.time, "perf_counter", lambda: clock.now)
    clock.steps = 7
    log = StatsLog(clock, writer=scalars, every=4)
    counted = []
    for seconds, clock.steps in (
        (1.0, 7),
        (1.0, 8),  # Nobody knows when this step began.
        (0.0, 8),  # PyTorch calls hooks twice in a step of Horovod's optimizer.
        (1.0, 9),
        (6.0, 12),  # Keras can make several steps at once: 2 seconds each, and the median is 1.5.
        (3.0, 11),  # The statistics began anew; at least this step was made.
        (5.0, 12),
        (1.0, 0),
        (3.0, 1),
        (7.0, 2),  # Of 3, 5, 4 and 7 seconds the median is 4.5.
    ):
        clock.now += seconds
        log("ignored", logs=clock)
        counted.append(log.step)
    assert counted == [0, 1, 1, 2, 5, 6, 7, 7, 8, 9]
    written = [(value, step) for name, value, step in scalars.given if name == "horovod_sparse/seconds"]
    assert written == [(1.5, 5), (4.5, 9)]


def test_a_resumed_run_adds_its_lines_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    for start in (0, 4):
        reduce = reduction()
        train(reduce, StatsLog(reduce, path, every=2, start=start), 5)
    found = [(line["step"], "package" in line) for line in lines(path)]
    assert found == [(0, True), (2, False), (4, False), (4, True), (6, False), (8, False)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "path or writer must be given, such as path='stats.jsonl', got None for both"),
        ({"path": "x", "every": 0}, ValueError, "every must be >= 1, got 0"),
        ({"path": "x", "every": 0.5}, TypeError, "every must be an int >= 1, got 0.5"),
        ({"path": "x", "start": -1}, ValueError, "start must be >= 0, got -1"),
        ({"writer": "a file"}, TypeError, "must have a method add_scalar, as a SummaryWriter has, got 'a file'"),
        *(
            ({"path": "x", "compression": wrong}, TypeError, f"or a SparseAllreduce, got {wrong!r}")
            for wrong in (TopK(0.1, warmup=None), SparseAllreduce)
        ),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as raised:
        StatsLog(**{"compression": reduction(), **arguments})
    assert str(raised.value).endswith(message)
    assert not [*tmp_path.iterdir()]
