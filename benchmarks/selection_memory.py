"""Prints the most bytes that one step of a case takes beyond what it begins with. Linux only.

    python benchmarks/selection_memory.py CASE SIZE RATIO THREADS BACKEND

That is the peak of the process's resident set during the step, minus the resident set before it. The system knows the
resident set only to about half a megabyte, so be careful with small buckets.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

from selection_contestants import Stepper
from selection_rows import CASES, DATA, Conditions
from selection_worker import Gradients, make_backend

from horovod_sparse import kernels

_PEAK = Path("/proc/self/clear_refs")


def measure(case: int, conditions: Conditions) -> float | None:
    """Return the memory that a case takes, as a fraction of the residual. None if the system does not tell."""
    if not _PEAK.exists() or conditions.backend == "tensorflow":
        return None
    arguments = [case, conditions.size, conditions.ratio, conditions.threads, conditions.backend]
    # It is measured in a process of its own, so that nothing is left of other cases.
    done = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)],
        # These make freed memory go back to the system, so that the next step's peak shows it again.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout) / (4 * conditions.size)


def _resident(field: str) -> int:
    """Return the resident set in bytes: "VmRSS" is the current one, "VmHWM" the peak since it was reset."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return 1024 * int(found.group(1))


def main() -> None:
    case, size, ratio, threads = CASES[int(sys.argv[1])], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    conditions = Conditions(size, ratio, threads, sys.argv[5], kernels.variant())
    backend = make_backend(conditions.backend, threads)
    gradients = Gradients(backend, size, DATA[case.data])
    stepper = Stepper(case, backend, conditions, gradients)
    stepper.warm_up()
    if case.cold:
        stepper.start()
    gradient = gradients.next()
    gc.collect()
    kernels.pool.forget()
    before = _resident("VmRSS")
    _PEAK.write_text("5", encoding="ascii")
    stepper.step(gradient)
    print(max(0, _resident("VmHWM") - before))


if __name__ == "__main__":
    main()
