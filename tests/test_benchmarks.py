"""What figures of the pages rest on: hosts that are namespaces, steps until a loss, and QSGD."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from parallel.launch import REPOSITORY, clean_environment
from process import python

HOSTS = REPOSITORY / "benchmarks" / "hosts.py"


class Done(NamedTuple):
    """How a run on hosts ended."""

    code: int
    output: str
    process: int


def run_on_hosts(*command: str) -> Done:
    """Run a command by `hosts.py`, whose options come first; skip where no hosts can be made."""
    sys.path.append(str(HOSTS.parent))
    import hosts

    reason = hosts.missing()
    if reason:
        pytest.skip(reason)
    whole = [sys.executable, str(HOSTS), *command]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(whole, env=clean_environment(), cwd=REPOSITORY, **pipes) as process:
        output, _ = process.communicate(timeout=240)
    return Done(process.returncode, output, process.pid)


@pytest.mark.full
@pytest.mark.parallel
def test_workers_run_on_hosts_of_their_own_and_nothing_is_left() -> None:
    told = "hostname; ip -4 -o address show eth0; tc qdisc show dev eth0; exit 3"
    done = run_on_hosts("--hosts", "3", "--rate", "100mbit", "--", "sh", "-c", told)
    assert done.code == 3, done
    for number in range(3):
        assert f"host{number}\n" in done.output
        assert f"inet 10.77.0.{number + 1}/24" in done.output
    assert done.output.count("tbf") == done.output.count("rate 100Mbit") == 3
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"hs{done.process}-" not in spaces


_HELLO = """
import os, socket, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.bind(("10.77.0.2", 5000))
        while True:
            _, other = here.recvfrom(9)
            here.sendto(b"there", other)
else:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.settimeout(1)
        while True:
            begun = time.monotonic()
            here.sendto(b"hello", ("10.77.0.2", 5000))
            try:
                here.recv(9)
            except OSError:
                continue
            break
    assert time.monotonic() - begun >= 0.08, "a round trip took less than twice the delay"
    print("both ways", flush=True)
    # mpirun then ends the other one.
    os._exit(5)
"""


@pytest.mark.full
@pytest.mark.parallel
def test_frames_of_far_hosts_arrive_late() -> None:
    done = run_on_hosts("--delay", "40", "--loss", "10", "--", sys.executable, "-c", _HELLO)
    assert done.code == 5 and "both ways" in done.output, done
    assert not Path(f"/run/netns/hs{done.process}-host0").exists()


@pytest.mark.full
@pytest.mark.parallel
@pytest.mark.parametrize("number", [2, 4])
def test_workers_of_a_host_act_as_one(number: int) -> None:
    """Hosts with two workers each: a host sends to the others what one worker would."""
    options = ["--compression", "sidco", "--ratio", "0.01", "--warmup", "none", "--epochs", "1"]
    program = [sys.executable, "examples/torch_digits.py", *options, "--exchange", "hierarchical"]
    done = run_on_hosts("--hosts", str(number), "--slots", "2", "--", *program)
    assert done.code == 0, done
    ratio = float(done.output.split("ratio ")[1].split()[0])
    # Each of the two workers sends half of what one worker of the host would.
    assert 0.004 < ratio < 0.006, done


@pytest.fixture
def studies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the modules of studies/ importable."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "studies"))


@pytest.mark.parametrize(
    ("losses", "target", "steps"),
    [
        ([4.0, 3.0, 2.0], 2.25, 27.5),
        ([4.0, 3.0, 3.5, 2.0], 3.25, 17.5),
        ([4.0, 3.0, 2.0], 1.9, None),
        ([math.nan, math.nan], 3.0, None),
    ],
)
def test_steps_until_the_target(studies: None, losses: list[float], target: float, steps: float | None) -> None:
    import loss_runs

    at = [10 * number for number in range(1, len(losses) + 1)]
    curve = loss_runs.Curve(at, losses, [0.5 * step for step in at], 8.0, diverged=False)
    assert curve.reached(target, curve.steps) == steps
    assert curve.reached(target, curve.seconds) == (None if steps is None else 0.5 * steps)


QSGD = """
import sys
sys.path.insert(0, "studies")
import numpy as np
from memory_sgd import QSGD, _gamma_code

rng = np.random.default_rng(0)
gradient = rng.normal(size=50) * rng.exponential(size=50)
for bits in (2, 4, 8):
    qsgd = QSGD(bits, seed=0)
    rounded = np.array([qsgd(gradient) for _ in range(4000)])
    step = np.linalg.norm(gradient) / (2**bits - 1)
    # Levels within one step of the entry, of its sign, and right on average (five standard errors).
    assert np.allclose(rounded / step, np.round(rounded / step))
    assert np.abs(rounded - gradient).max() <= step * (1 + 1e-12)
    assert (rounded * gradient >= 0).all()
    assert np.abs(rounded.mean(0) - gradient).max() <= 5 * step / 2 / np.sqrt(4000)
    # No message is longer than a norm, and sign and level of every entry.
    assert len(qsgd.sent) == 4000 and 32 < max(qsgd.sent) <= 32 + 50 * (1 + bits)
    # One entry in the third place: gap 3, sign, the largest level.
    one = QSGD(bits, seed=0)
    assert one(np.eye(50)[2]).tolist() == np.eye(50)[2].tolist()
    assert one.sent == [32 + min(3 + 1 + 2 * (bits - 1) + 1, 50 * (1 + bits))]
# The gamma code of n has 2 floor(log2 n) + 1 bits.
assert _gamma_code(np.array([1, 2, 3, 4, 8])) == 1 + 3 + 3 + 5 + 7
"""


@pytest.mark.full
def test_qsgd_rounds_without_bias_and_counts_its_bits() -> None:
    """In a process of its own, because the study initialises MPI."""
    done = python("-c", QSGD)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
@pytest.mark.parallel
def test_steps_of_two_processes_are_timed_as_on_a_gpu() -> None:
    rows = ("computation alone", "dense fp32", "SIDCo 0.01", "AdamW, SIDCo 0.01")
    options = ("--on-cpu", "--width", 64, "--layers", 1, "--context", 32, "--rounds", 2)
    done = python("benchmarks/gpu_step.py", *options, "--rows", *rows, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert all(f"| {row} | " in done.stdout for row in rows)
