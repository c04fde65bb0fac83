"""Run the tests in parts: those of one process share the cores, those that start several processes need them all.

    python ci/tests.py [--full]

Every part runs, whatever the others came to. At the end the failures of all parts are listed. With `--full` the same parts
take in what `make test` leaves out, and draw more examples.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHARED = ["--numprocesses", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
QUICK = {"in one process": [*SHARED, "-m", "not full and not parallel"], "launches": ["-m", "not full and parallel"]}
FULL = {
    "in one process": [*SHARED, "-m", "not parallel", "--hypothesis-profile", "full"],
    "launches": ["-m", "parallel"],
}


def run(options: list[str]) -> list[str]:
    """Run pytest with these options. Return the tests that failed, or how pytest ended if it names none."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "tests", "-o", f"cache_dir={folder}", *options]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        failed = Path(folder, "v", "cache", "lastfailed")
        names = sorted(json.loads(failed.read_text(encoding="utf-8"))) if failed.exists() else []
    return names or ([f"pytest ended with status {status}"] if status else [])


def main(arguments: list[str]) -> int:
    """Run the parts and return the exit status."""
    if arguments not in ([], ["--full"]):
        raise SystemExit(f"the only argument must be --full, got {arguments}")
    lines, failures = [], 0
    for part, options in (FULL if arguments else QUICK).items():
        begun = time.monotonic()
        failed = run(options)
        failures += len(failed)
        lines.append(f"{part}: {f'{len(failed)} failed' if failed else 'passed'} ({time.monotonic() - begun:.0f} s)")
        lines += [f"    {name}" for name in failed]
    print("", *lines, sep="\n")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
