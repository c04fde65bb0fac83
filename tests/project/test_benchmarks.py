"""Workers on hosts that are namespaces train together."""

from __future__ import annotations

import sys
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
