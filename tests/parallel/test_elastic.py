"""Elastic jobs: workers die and come while others train."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from tests.harness.launch import Launch

from .elastic import FIRST_HOSTS, write_hosts

pytestmark = [pytest.mark.parallel, pytest.mark.full]

LIMIT = 400.0
"""Seconds; an idle machine needs about a tenth."""


def test_workers_die_and_come(tmp_path: Path) -> None:
    hosts, discovery = tmp_path / "hosts", tmp_path / "discovery.sh"
    write_hosts(hosts, FIRST_HOSTS)
    discovery.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discovery.chmod(discovery.stat().st_mode | stat.S_IXUSR)
    launch = Launch("elastic", 2, process_sets=False)
    options = ("-np", "2", "--min-np", "1", "--max-np", "4", "--host-discovery-script", str(discovery))
    # With dynamic process sets, stock Horovod hangs when a worker has died.
    # Stock Horovod sometimes waits so long for a survivor that has noticed a death earlier.
    environment = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "30"}
    ended = launch.run(
        "-m", "tests.parallel.elastic", str(hosts), limit=LIMIT, environment=environment, options=options
    )
    assert ended.code == 0, str(ended)
    begun = re.findall(r"rank (\d) of (\d) begins at step (\d+)", ended.output)
    # Two workers; one is left; two more come; one dies.
    assert {(int(size), int(step)) for _, size, step in begun if size != "3"} == {(2, 0), (1, 6), (2, 20)}, begun
    (joined,) = {int(step) for _, size, step in begun if size == "3"}
    assert 12 < joined < 20
    assert re.findall(r"rank \d trained with \[1, 2, 3\] workers, and ended with 2", ended.output)
    assert len(re.findall(r"trained with .* workers, and ended with 2", ended.output)) == 2
