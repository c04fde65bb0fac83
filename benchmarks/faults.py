"""How long a job lives on after one of its ranks has failed: prints the rows that docs/guarantees.md sums up.

    python benchmarks/faults.py

A rank of two raises, exits or is killed at a chosen moment (tests/parallel/injected.py). Printed are the seconds from there
until the launch had ended by itself on both ranks, and whether the log tells the cause.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import markdown

from tests.harness.launch import Launch
from tests.parallel.injected import FAULTS, LAUNCHES, MOMENTS, SHOWN, Fault, run

NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}


def cell(launch: Launch, fault: Fault) -> str:
    """The seconds, or what went wrong."""
    outcome = run(launch, fault)
    if outcome.ended.code in (None, 0) or outcome.seconds is None:
        print(f"{fault}, {launch}: {outcome.ended}", file=sys.stderr)
        return "does not end" if outcome.ended.code is None else "wrong"
    return f"{outcome.seconds:.1f}" + ("" if outcome.says(fault) else ", without the cause")


def main() -> None:
    print(
        markdown.table(["", "one rank, at this moment", "does this", "mpirun (MPI)", "horovodrun (Gloo)"], [], words=3)
    )
    for fault in FAULTS:
        seconds = [cell(launch, fault) for launch in LAUNCHES[fault.framework]]
        row = [NAMES[fault.framework], MOMENTS[fault.moment], SHOWN[fault.action], *seconds]
        print(markdown.line(row), flush=True)


if __name__ == "__main__":
    main()
