"""Workers on hosts that are namespaces train together; a selection of one's own is timed and checked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.process import ROOT, python

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.full
@pytest.mark.parallel
def test_workers_on_several_hosts_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts with two workers each."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import hosts

    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    options: list[Any] = ["--hosts", 2, "--slots", 2, "--", sys.executable, "examples/torch_digits.py"]
    options += ["--compression", "sidco", "--ratio", 0.01, "--warmup", "none", "--epochs", 1]
    done = python(BENCHMARKS / "hosts.py", *options, limit=240)
    assert done.returncode == 0, done
    ratio = float(done.stdout.split("ratio ")[1].split()[0])
    assert 0.008 < ratio < 0.012, done


OLDEST = """
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from horovod_sparse.compressors.base import ALONE, BucketState, Compressor
from horovod_sparse.ops.protocol import Selection


@dataclass
class Ages(BucketState):
    saved: ClassVar[tuple[str, ...]] = ("ages",)
    ages: np.ndarray = field(default_factory=lambda: np.zeros(0))


class Oldest(Compressor):
    def new_state(self, place=ALONE):
        return Ages(place, ages=np.zeros(place.numel))

    def select(self, ops, x, k, capacity, state):
        chosen = np.sort(np.argsort(-state.ages, kind="stable")[:k])
        state.ages += 1
        state.ages[chosen] = 0
        return Selection(ops.indices(chosen, x), k)
"""


@pytest.mark.full
def test_a_selection_may_change_arrays_of_its_state_in_place(tmp_path: Path) -> None:
    """The benchmark selects again from the state before the step, and compares."""
    (tmp_path / "of_ones_own.py").write_text(OLDEST)
    options = ("--sizes", "2k", "--rows", "TopK", "--compression", "of_ones_own:Oldest")
    done = python(BENCHMARKS / "selection.py", *options, cwd=tmp_path, limit=300, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "| Oldest | " in done.stdout
