"""`benchmarks/selection.py`: what it times selects as it should."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from horovod_sparse import kernels

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
from selection_rows import ROWS, Conditions, Row  # noqa: E402
from selection_worker import Gradients, Worker, make_backend  # noqa: E402

CONDITIONS = Conditions(10_000, 0.01, 1, "numpy", kernels.variant())
SMALL = ["--sizes", "10k", "--ratios", "0.01", "--repetitions", "2"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_every_row_selects_as_the_oracle_does(row: Row) -> None:
    backend = make_backend("numpy", 1)
    worker, gradients = Worker(backend, row, CONDITIONS), Gradients(backend, CONDITIONS.size)
    for _ in range(row.warm_steps):
        worker.step(gradients.next())
    worker.check()


@pytest.mark.full
def test_the_benchmark_writes_down_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, variant = tmp_path / "table.json", "auto" if kernels.available() else "off"
    pytest.importorskip("horovod.torch")
    options = [*SMALL, "--json", str(table), "--operations", "--kernels", variant]
    monkeypatch.setattr(sys, "argv", ["selection.py", *options])
    assert import_module("selection").main() == 0
    results = json.loads(table.read_text())["results"]
    expected = {"SIDCo, exponential", "SIDCo, gamma, heavy tails", "TopK, first step", "Threshold", "NoOp", "DGC"}
    expected |= {"MiCRO, 8 workers", "decompress, 4 workers", "fp16: cast and back"}
    assert expected <= {result["title"] for result in results}
    for result in results:
        assert len(result["quotients"]) == 2 and all(quotient > 0 for quotient in result["quotients"])
