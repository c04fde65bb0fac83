"""Hosts that are network namespaces, and the benchmark of whole steps that is run on them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from parallel.launch import REPOSITORY, Launch, clean_environment

SCRIPT = REPOSITORY / "benchmarks" / "hosts.py"


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `benchmarks/hosts.py`."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import hosts

    return hosts


@pytest.mark.full
@pytest.mark.parallel
def test_workers_run_on_hosts_of_their_own_and_nothing_is_left(hosts: Any) -> None:
    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    told = "hostname; ip -4 -o address show eth0; tc qdisc show dev eth0; exit 3"
    command = [sys.executable, SCRIPT, "--hosts", "3", "--rate", "100mbit", "--", "sh", "-c", told]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=clean_environment(), **pipes) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 3, output
    for number in range(3):
        assert f"host{number}\n" in output
        assert f"inet 10.77.0.{number + 1}/24" in output
    assert output.count("tbf") == output.count("rate 100Mbit") == 3
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"hs{process.pid}-" not in spaces


@pytest.mark.full
@pytest.mark.parallel
@pytest.mark.parametrize("number", [2, 4])
def test_workers_of_a_host_act_as_one(hosts: Any, number: int) -> None:
    """Hosts with two workers each: a host sends to the others what one worker would."""
    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    options = ["--compression", "sidco", "--ratio", "0.01", "--warmup", "none", "--epochs", "1"]
    options += ["--exchange", "hierarchical"]
    program = [sys.executable, "examples/torch_digits.py", *options]
    command = [sys.executable, SCRIPT, "--hosts", str(number), "--slots", "2", "--", *program]
    done = subprocess.run(
        command, env=clean_environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ratio = float(done.stdout.split("ratio ")[1].split()[0])
    # Each of the two workers sends half of what one worker of the host would.
    assert 0.004 < ratio < 0.006, done.stdout


@pytest.mark.full
@pytest.mark.parallel
def test_step_time_prints_a_row_for_each_contender() -> None:
    names = ["none: computation alone", "dense fp32", "dense fp16", "DDP fp16", "DDP PowerSGD rank 1", "SIDCo 0.01"]
    names += ["SIDCo 0.001"]
    small = ["--rounds", "2", "--width", "32", "--layers", "1", "--heads", "2", "--context", "16", "--rows", *names[2:]]
    ended = Launch("mpirun", 2).run("benchmarks/step_time.py", *small, limit=120)
    assert ended.code == 0, ended
    rows = [line.strip("| ").split(" | ") for line in ended.output.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == names
    assert [row[1] for row in rows[3:5]] == ["not counted"] * 2
    sent = [int(rows[number][1].replace(",", "")) for number in (1, 2, 5, 6)]
    assert sent[0] == 2 * sent[1] > 5 * sent[2] > 5 * sent[3] > 0
    assert "2 workers on 1 hosts; 2 rounds" in ended.output
