"""What becomes of a job between two far hosts whose network fails: prints the table of docs/guarantees.md. Needs root.

    sudo .venv/bin/python benchmarks/far_faults.py [--faults "link cut for 5 s"] [--launchers mpirun]

A small transformer trains on two hosts, 100 Mbit/s and 20 ms apart. After its first epoch the fault begins. Printed are the
seconds by which the job took longer than without a fault, and whether the parameters are the same in the end, to the last bit:
then nothing was lost, and nothing was counted twice. Of a job that does not go on, the table has its exit status.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import hosts
import markdown

ROOT = Path(__file__).resolve().parent.parent
NETWORK = hosts.Network("100mbit", 20.0)
LIMIT = 400
"""Seconds after which a job is ended that does not end by itself."""
TRAINING = ["--width", "64", "--epochs", "6", "--epoch-steps", "20", "--compression", "sidco", "--ratio", "0.01"]
LAUNCHERS = {"mpirun": "mpirun (MPI)", "horovodrun": "horovodrun (Gloo)"}

Fault = Callable[[hosts.Cluster, str, threading.Event], None]
"""What happens to a host; the event says that the job has ended."""


def cut(seconds: float) -> Fault:
    """Take a host from the network for some seconds."""

    def happen(where: hosts.Cluster, host: str, _: threading.Event) -> None:
        where.set_link(host, "down")
        time.sleep(seconds)
        where.set_link(host, "up")

    return happen


def slow_link(where: hosts.Cluster, host: str, _: threading.Event) -> None:
    """From now on, a host sends at a tenth of the rate."""
    where.shape(host, "10mbit")


def slow_host(where: hosts.Cluster, host: str, ended: threading.Event) -> None:
    """From now on, a host's processes stand still for nine tenths of the time."""
    while not ended.is_set():
        for name, seconds in ((signal.SIGSTOP, 0.9), (signal.SIGCONT, 0.1)):
            for process in where.processes(host):
                with suppress(ProcessLookupError):
                    os.kill(process, name)
            time.sleep(seconds)


FAULTS: dict[str, tuple[hosts.Network, Fault | None]] = {
    "none": (NETWORK, None),
    **{f"link cut for {seconds} s": (NETWORK, cut(seconds)) for seconds in (5, 30, 120)},
    "one host sends at a tenth of the rate": (NETWORK, slow_link),
    "one host computes at a tenth of the speed": (NETWORK, slow_host),
    "5 % of the frames are lost": (NETWORK._replace(loss=5.0), None),
}


def train(network: hosts.Network, fault: Fault | None, launcher: str) -> tuple[int, float, str]:
    """Return the job's exit status, the seconds that its steps took or that it lived, and the hash of its parameters."""
    with tempfile.TemporaryDirectory() as folder, hosts.cluster(2, network) as where:
        log = Path(folder, "log.jsonl")
        script = [sys.executable, str(ROOT / "examples" / "torch_charlm.py"), *TRAINING, "--log-file", str(log)]
        ended = threading.Event()
        watch = threading.Thread(target=_begin, args=(where, log, fault, ended))
        watch.start()
        begun = time.monotonic()
        status = hosts.run(where, launcher, 1, ["timeout", str(LIMIT), *script])
        seconds = time.monotonic() - begun
        ended.set()
        # The hosts are there until the fault is over.
        watch.join()
        end = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
        return status, end.get("seconds", seconds) if status == 0 else seconds, end.get("parameter_hash", "")


def _begin(where: hosts.Cluster, log: Path, fault: Fault | None, ended: threading.Event) -> None:
    """Let the fault happen after the first epoch, unless the job has ended before."""
    while fault is not None and not ended.wait(0.1):
        if log.exists() and '"epoch", ' in log.read_text(encoding="utf-8"):
            return fault(where, where.hosts[-1], ended)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", nargs="+", choices=[*FAULTS], default=[*FAULTS][1:])
    parser.add_argument("--launchers", nargs="+", choices=[*LAUNCHERS], default=[*LAUNCHERS])
    args = parser.parse_args()
    without = {launcher: train(*FAULTS["none"], launcher) for launcher in args.launchers}
    rows = []
    for name in args.faults:
        cells = [name]
        for launcher, (_, usual, parameters) in without.items():
            status, seconds, found = train(*FAULTS[name], launcher)
            if status:
                cells.append(f"ends after {seconds:.0f} s, status {status}")
            else:
                same = "the same" if found == parameters else "OTHER"
                cells.append(f"goes on, {seconds - usual:.0f} s longer, {same} parameters")
        rows.append(cells)
    told = ", ".join(f"{LAUNCHERS[launcher]} {one[1]:.0f} s" for launcher, one in without.items())
    print(f"2 hosts at {NETWORK}; without a fault: {told}\n")
    print(markdown.table(["fault", *map(LAUNCHERS.__getitem__, args.launchers)], rows, words=1 + len(args.launchers)))


if __name__ == "__main__":
    main()
