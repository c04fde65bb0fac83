"""Start collectives alone, while another thread waits for the interpreter's lock.

python -m tests.parallel.unlocked
"""

from __future__ import annotations

import sys
import threading

import horovod.torch as hvd
import torch
from horovod.torch import mpi_lib_v2

MOST = 10_000
"""Collectives until the other thread must have had the lock. A few are enough."""


def main() -> None:
    hvd.init()
    sent = torch.arange(4.0)
    # Made before: PyTorch gives the lock away while it makes a tensor.
    received = [torch.empty(0) for _ in range(MOST)]
    ran, may_run = threading.Event(), threading.Lock()

    def run() -> None:
        with may_run:
            ran.set()

    # The interpreter itself never takes the lock away: the other thread gets it only if Horovod's function lets go of it.
    sys.setswitchinterval(1000.0)
    may_run.acquire()
    thread = threading.Thread(target=run)
    thread.start()
    may_run.release()
    allgather = mpi_lib_v2.horovod_torch_allgather_async_torch_FloatTensor
    handles: list[int] = []
    while not ran.is_set() and len(handles) < MOST:
        number = len(handles)
        handles.append(allgather(sent, received[number], f"unlocked.{number}", 0))
    unlocked = ran.is_set()
    thread.join()
    for handle in handles:
        mpi_lib_v2.horovod_torch_wait_and_clear(handle)
    assert all(torch.equal(tensor, sent) for tensor in received[: len(handles)])
    assert unlocked, f"{len(handles)} collectives were started, and no other thread could run meanwhile"
    print("another thread ran")


if __name__ == "__main__":
    main()
