"""`studies/time_to_loss.py`: steps to a target, and tables; and the examples under DDP."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from parallel.launch import REPOSITORY, Launch

NETWORK = "1gbit"
TIMEOUT = 60.0
RATES = (0.0125, 0.025, 0.05)


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `studies/loss_runs.py`; it makes those beside it importable."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import loss_runs

    return loss_runs


def write_log(script: Path, options: list[str], log: Path, *, workers: int, timeout: float) -> bool:
    """Stands for `runs.diverges`: writes the log that a run would leave, with a loss that falls in each evaluation."""
    rate, seed = (float(options[options.index(name) + 1]) for name in ("--lr", "--seed"))
    lines: list[dict[str, Any]] = [{"event": "settings", "parameters": 1000}]
    for number in range(1, 6):
        loss = 6.0 - number * (1.0 + seed / 10 - abs(rate - RATES[1]))
        fixed = {"event": "epoch", "seconds": 2.0, "step_seconds": 0.2, "bytes_per_step": 8.0}
        lines.append({**fixed, "step": 10 * number, "bits_per_character": loss})
    log.write_text("\n".join(json.dumps(line) for line in lines))
    return False


def store_at(benchmarks: Any, folder: Path, *, trains: bool = True) -> Any:
    return benchmarks.Store(folder, "charlm", trains=trains, timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("losses", "target", "steps"),
    [
        ([4.0, 3.0, 2.0], 2.25, 27.5),
        ([4.0, 3.0, 3.5, 2.0], 3.25, 17.5),
        ([4.0, 3.0, 2.0], 1.9, None),
        ([math.nan, math.nan], 3.0, None),
    ],
)
def test_steps_until_the_target(benchmarks: Any, losses: list[float], target: float, steps: float | None) -> None:
    at = [10 * number for number in range(1, len(losses) + 1)]
    curve = benchmarks.Curve(at, losses, [0.5 * step for step in at], 0.1, False, 8.0, 1000)
    assert curve.reached(target, curve.steps) == steps
    assert curve.reached(target, curve.seconds) == (None if steps is None else 0.5 * steps)


def step_file(store: Any, name: str, number: int, seconds: float) -> None:
    path = store.folder / f"step_{NETWORK}_{name.replace(' ', '-')}_{number}.json"
    timing = {"seconds": seconds, "bytes_per_step": 8.0, "machine": "a machine"}
    path.write_text(json.dumps({"command": [], "result": timing}))


def cells(page: str, name: str) -> list[list[str]]:
    """The cells of a row in each table, without its name."""
    lines = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    return [line.strip("| ").split(" | ")[1:] for line in lines]


def test_time_to_the_target_is_steps_times_step_time(
    benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import loss_report

    monkeypatch.setattr(benchmarks.runs, "diverges", write_log)
    store = store_at(benchmarks, tmp_path)
    rows = ["dense fp16", "DDP fp16", "SIDCo 0.01"]
    for name in (benchmarks.DENSE, *rows):
        store.curves(name)
        for number, factor in enumerate((1.0, 1.5, 9.0)):
            step_file(store, name, number, factor * (0.2 if name == "SIDCo 0.01" else 0.8))
    found, missing = loss_report.results(store_at(benchmarks, tmp_path, trains=False), [*rows, "MiCRO 0.01"])
    assert missing == ["MiCRO 0.01"]
    # At 80 % of 50 steps the three seeds have 2.0, 1.6 and 1.2.
    target = store.target()
    assert target == pytest.approx(2.0)
    page = loss_report.page(store, found, target)
    curve, time = cells(page, "SIDCo 0.01")
    assert curve == ["0.025", "1.062 (0.0125), 1.000 (0.025), 1.125 (0.05)", "1.000, 0.500, 0.000", "40, 36, 33", "37"]
    steps = (40 + 4.0 / 1.1 * 10 + 4.0 / 1.2 * 10) / 3
    assert float(time[3]) == pytest.approx(steps * 0.3, abs=0.05)
    assert time == ["300.0 (200.0–1800.0)", "8", "37", "11.0", "4.00", "–"]
    assert cells(page, "DDP fp16")[0][1:] == ["not counted", "37", "43.9", "1.00", "–"]
    picture = tmp_path / "picture.png"
    loss_report.draw(store, found, target, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.parallel
@pytest.mark.parametrize(("example", "field"), [("torch_charlm", "bits_per_character"), ("torch_lstm", "seconds")])
def test_examples_train_with_ddp(example: str, field: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    small = ["--epochs", "2", "--epoch-steps", "4", "--context", "16", "--width", "32", "--layers", "1"]
    ended = Launch("mpirun", 2).run(
        "studies/loss_ddp.py",
        example,
        "PowerSGD 4",
        "--compression",
        "none",
        *small,
        "--log-file",
        str(log),
        limit=120,
    )
    assert ended.code == 0, ended
    _, *epochs, end = (json.loads(line) for line in log.read_text().splitlines())
    assert [epoch["step"] for epoch in epochs] == [4, 8]
    assert all(epoch[field] > 0.0 for epoch in epochs)
    # All workers ended with the same parameters.
    assert len(end["parameter_hash"]) == 64
