"""Hosts that are network namespaces, and the benchmark of whole steps that is run on them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
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


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["-x", "host1", "PATH=/here:$PATH ; orted -mca a 1"], "PATH=/here:$PATH ; orted -mca a 1"),
        (["-o", "A=no", "-o", "B=no", "host1", "-o", "ConnectTimeout=10", "true"], "true"),
        (["-p", "22", "host1", "sh", "-c", "'exit 3'"], "sh -c 'exit 3'"),
    ],
    ids=["mpirun", "horovodrun", "words"],
)
def test_the_agent_is_called_as_ssh_is(hosts: Any, tmp_path: Path, arguments: list[str], command: str) -> None:
    agent = tmp_path / "ssh"
    agent.write_text(hosts.AGENT.format(prefix="hs1", names="/names"))
    echo = tmp_path / "ip"
    echo.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    for program in (agent, echo):
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([agent, *arguments], env=environment, capture_output=True, text=True, check=True)
    inside = f"mount --bind /names /etc/hosts && hostname host1 && {command}"
    assert done.stdout.splitlines() == ["netns", "exec", "hs1-host1", "unshare", "--uts", "sh", "-c", inside]


def test_launchers_are_told_hosts_and_slots(hosts: Any) -> None:
    where = hosts.Cluster(("host0", "host1"), Path("/agent/ssh"))
    for launcher in ("mpirun", "horovodrun"):
        command = hosts.launch(where, launcher, 3, ["python", "train.py"])
        assert command[command.index("-np") + 1] == "6"
        assert command[command.index("-H") + 1] == "host0:3,host1:3"
        assert command[-2:] == ["python", "train.py"]
    assert where.inside(["a b", "c"]) == ["/agent/ssh", "host0", "'a b' c"]


@pytest.mark.parametrize(
    ("options", "message"), [([], "say what to run"), (["--hosts", "0", "--", "x"], "got 0 and 1")]
)
def test_wrong_options_are_refused(options: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr


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
    program = [sys.executable, "examples/torch_digits.py", "--compression", "sidco", "--ratio", "0.01", "--epochs", "1"]
    command = [sys.executable, SCRIPT, "--hosts", str(number), "--slots", "2", "--", *program, "--hierarchical"]
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


@pytest.mark.full
@pytest.mark.parallel
def test_step_picture_shows_the_collectives_of_two_steps(tmp_path: Path) -> None:
    picture = tmp_path / "step.png"
    small = ["--model", "linear", "--width", "64", "--layers", "4", "--rounds", "3", "--rows", "SIDCo 0.01"]
    ended = Launch("mpirun", 2).run("benchmarks/step_picture.py", *small, "--picture", str(picture), limit=120)
    assert ended.code == 0, ended
    assert picture.read_bytes().startswith(b"\x89PNG")
    number = r"(-?[\d.]+)"
    found = re.findall(
        f"backward {number} to {number} ms, collectives on their way {number} to {number} ms, .* at {number} ms",
        ended.output,
    )
    assert len(found) == 2, ended
    for step in found:
        backward, after, first, last, end = map(float, step)
        assert 0 <= backward <= after <= end and 0 <= first <= last


@pytest.mark.full
@pytest.mark.parallel
def test_step_timeline_names_every_part() -> None:
    small = ["--rounds", "2", "--width", "32", "--layers", "1", "--heads", "2", "--context", "16"]
    ended = Launch("mpirun", 2).run("benchmarks/step_timeline.py", *small, limit=120)
    assert ended.code == 0, ended
    spent = [line.strip("| ").split(" | ") for line in ended.output.splitlines() if line.startswith("| ")][1:]
    milliseconds = {part: float(number) for part, number, _ in spent}
    *parts, rest, together = milliseconds
    assert len(parts) == 6 and min(milliseconds[part] for part in parts) > 0
    assert milliseconds[together] == pytest.approx(sum(milliseconds[part] for part in [*parts, rest]), abs=0.5)
