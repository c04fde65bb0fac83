"""Prints the most bytes that one step of a row takes beyond what it begins with. Linux only.

    python -m horovod_sparse.tools.bench.memory ROW SIZE RATIO THREADS BACKEND

That is the peak of the process's resident set during the step, minus the resident set before it. The system knows the
resident set only to about half a megabyte, so be careful with small buckets.
"""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

from horovod_sparse import kernels
from horovod_sparse.tools.bench.backends import make_backend
from horovod_sparse.tools.bench.rows import ROWS
from horovod_sparse.tools.bench.worker import Gradients, Worker


def resident(field: str) -> int:
    """Return the resident set in bytes: "VmRSS" is the current one, "VmHWM" the peak since `forget_peak`."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return 1024 * int(found.group(1))


def forget_peak() -> None:
    """Reset the peak."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def main() -> None:
    """Take some steps, then print how much memory one more takes."""
    row, size, ratio, threads = ROWS[int(sys.argv[1])], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    backend = make_backend(sys.argv[5], threads)
    gradients = Gradients(backend, size)
    dense = backend.ops.zeros(size, "float32", backend.like)
    backend.host(dense).fill(0.0)
    worker = Worker(backend, row, ratio, size, dense)
    for _ in range(row.warm_steps):
        worker.step(gradients.next(row.data))
    if row.cold:
        worker.start()
    gradient = gradients.next(row.data)
    gc.collect()
    kernels.pool.forget()
    before = resident("VmRSS")
    forget_peak()
    worker.step(gradient)
    print(max(0, resident("VmHWM") - before))


if __name__ == "__main__":
    main()
