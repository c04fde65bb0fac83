"""Workers on hosts that are namespaces find those that share theirs."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from parallel.launch import REPOSITORY
from process import python

BENCHMARKS = REPOSITORY / "benchmarks"


@pytest.mark.full
@pytest.mark.parallel
def test_workers_of_a_host_act_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts with two workers each: a host sends to the others what one worker would."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import hosts

    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    options: list[Any] = ["--hosts", 2, "--slots", 2, "--", sys.executable, "examples/torch_digits.py"]
    options += ["--compression", "sidco", "--ratio", 0.01, "--warmup", "none", "--epochs", 1]
    done = python(BENCHMARKS / "hosts.py", *options, "--exchange", "hierarchical", limit=240)
    assert done.returncode == 0, done
    ratio = float(done.stdout.split("ratio ")[1].split()[0])
    # Each of the two workers sends half of what one worker of the host would.
    assert 0.004 < ratio < 0.006, done
