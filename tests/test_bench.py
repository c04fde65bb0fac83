"""`benchmarks/selection.py`: it times what a step does, and notices a wrong selection."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_sparse import kernels
from horovod_sparse.compressors.threshold import Threshold
from horovod_sparse.compressors.topk import TopK
from horovod_sparse.numpy.ops import NumpyOps
from horovod_sparse.ops.protocol import Selection

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
from selection_rows import ROWS, Conditions, Row  # noqa: E402
from selection_worker import Gradients, Worker, make_backend  # noqa: E402

CONDITIONS = Conditions(10_000, 0.01, 1, "numpy", kernels.variant())
SMALL = ["--sizes", "10k", "--ratios", "0.01", "--repetitions", "2"]
TOPK = next(row for row in ROWS if row.title == "TopK")


def worker_after(row: Row, steps: int, ops: NumpyOps | None = None) -> Worker:
    backend = make_backend("numpy", 1)
    if ops is not None:
        backend = replace(backend, ops=ops)
    worker, gradients = Worker(backend, row, CONDITIONS), Gradients(backend, CONDITIONS.size)
    for _ in range(steps):
        worker.step(gradients.next())
    return worker


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_every_row_selects_as_the_oracle_does(row: Row) -> None:
    worker_after(row, row.warm_steps).check()


class LosesOne(NumpyOps):
    def select_largest(self, x: Any, k: int) -> Selection:
        return super().select_largest(x, k - 1)


class LeavesAll(NumpyOps):
    def take(self, x: Any, indices: Any) -> Any:
        return x[indices]


@pytest.mark.parametrize(
    ("row", "ops", "message"),
    [
        (TOPK, LosesOne(), "TopK, 10,000 elements, .* sent 99 entries, 100 were due"),
        (TOPK, LeavesAll(), "TopK: what was sent is still in the residual"),
        (
            Row("all", lambda ratio: Threshold(0.0, ratio=ratio, slack=100.0)),
            None,
            "sent 10000 entries, 50 to 200 were due",
        ),
        (Row("few", lambda ratio: Threshold(1e3, ratio=ratio)), None, "sent 0 entries, 50 to 200 were due"),
    ],
)
def test_a_wrong_selection_is_noticed(row: Row, ops: NumpyOps | None, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        worker_after(row, 1, ops).check()


@pytest.mark.parametrize(("title", "compress"), [("TopK", 2), ("MiCRO, 8 workers", 3)])
def test_the_parts_of_a_step_are_told_apart(monkeypatch: pytest.MonkeyPatch, title: str, compress: int) -> None:
    """On a clock that advances by 1 at each look, a step takes 1 before and after each collective, and 1 at its end."""
    (row,) = (row for row in ROWS if row.title == title)
    worker = worker_after(row, 1)
    gradient = Gradients(make_backend("numpy", 1), CONDITIONS.size).next()
    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", count().__next__)
        spent = worker.step(gradient)
    assert (spent.compress, spent.write) == (compress, 1)
    assert row.part(spent) == compress
    assert replace(row, receives=True).part(spent) == 1


def test_the_messages_of_all_workers_are_written() -> None:
    dense = np.zeros(CONDITIONS.size, np.float32)
    backend = make_backend("numpy", 1)
    gradient = Gradients(backend, CONDITIONS.size).next()
    Worker(backend, Row("decompress", TopK, world=4, receives=True), CONDITIONS, dense).step(gradient)
    # The other workers send what this one sends.
    assert np.count_nonzero(dense) == 100
    assert np.array_equal(dense[dense != 0.0], 4.0 * gradient[dense != 0.0])


def run_selection(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    pytest.importorskip("horovod.torch")
    monkeypatch.setattr(sys, "argv", ["selection.py", *SMALL, *options])
    status: int = import_module("selection").main()
    return status


@pytest.mark.full
def test_the_benchmark_times_whole_steps_in_tensorflow() -> None:
    pytest.importorskip("horovod.tensorflow", exc_type=ImportError)
    # In a process of its own, because the number of TensorFlow's threads is set once.
    options = [*SMALL, "--backend", "tensorflow", "--rows", "TopK"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "selection.py"), *options], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for where in ("eager code", "a tf.function", "PyTorch"):
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"TopK, whole step in {where}  "))
        assert float(line.removeprefix(f"TopK, whole step in {where}").split()[0]) > 0.0


def test_the_benchmark_times_every_row_in_numpy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row.title for row in ROWS]
    assert run_selection(monkeypatch, "--backend", "numpy", "--rows", *rows) == 0
    printed = capsys.readouterr().out
    assert f"10,000 elements, ratio 0.01, numpy, kernels: {kernels.variant()}, threads: 1" in printed
    for title in rows:
        (line,) = (line for line in printed.splitlines() if line.startswith(f"{title}  "))
        assert float(line.removeprefix(title).split()[0]) > 0.0


@pytest.mark.full
def test_the_benchmark_writes_down_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, variant = tmp_path / "table.json", "auto" if kernels.available() else "off"
    assert run_selection(monkeypatch, "--json", str(table), "--operations", "--kernels", variant) == 0
    printed = capsys.readouterr().out
    results = json.loads(table.read_text())["results"]
    expected = {"SIDCo, exponential", "SIDCo, gamma, heavy tails", "TopK, first step", "Threshold", "NoOp", "DGC"}
    expected |= {"MiCRO, 8 workers", "decompress, 4 workers", "fp16: cast and back"}
    assert expected <= {result["title"] for result in results}
    for result in results:
        assert len(result["quotients"]) == 2 and all(quotient > 0 for quotient in result["quotients"])
        assert f"{result['title']:31}  {result['units']:.2f}".split() in [
            line.split()[: len(result["title"].split()) + 1] for line in printed.splitlines()
        ]
        compares = result["title"].startswith(("torch.topk", "SIDCo in plain", "fp16"))
        assert bool(result["operations"]) != compares


def test_the_benchmark_holds_no_bar_under_other_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="--bars needs rows"):
        run_selection(monkeypatch, "--rows", "RandomBlock", "--bars", "--kernels", "off")


def test_the_benchmark_knows_which_kernels_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ("off", "auto", *kernels.variants())
    other = next(name for name in kernels.NAMES if name not in here)
    with pytest.raises(SystemExit, match=f"--kernels must be among .* got {other}"):
        run_selection(monkeypatch, "--kernels", other)
