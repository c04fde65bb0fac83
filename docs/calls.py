"""Print the calls that a gradient passes through in one real step: SIDCo under `hvd.DistributedOptimizer`.

    python docs/calls.py

One process makes steps of a model with one parameter; the last one is printed. `sys.setprofile` looks at the stack whenever
the data is read or written: in an operation on the arrays, in the algorithm, and in Horovod. A function of the package counts
if it is on one of these stacks. Needs Python 3.11, which knows the full names of functions.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

_PACKAGE = "/horovod_sparse/"
_THERE = {"TrackedMemory.add", "SIDCo.select", "KernelOps.take_pairs_out", "allgather_async"}
_BACK = {"synchronize", "KernelOps.rows_in_use", "KernelOps.assemble"}
"""The functions of the package, and of Horovod, that have the data in their hands."""


def traced(touching: set[str], action: Any) -> list[str]:
    """Return the functions on the stacks above those that are `touching` the data, while `action` runs, and in which file."""
    found: dict[str, None] = {}

    def look(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code.co_qualname not in touching:
            return
        stack: list[str] = []
        above: FrameType | None = frame
        while above is not None:
            code = above.f_code
            # Comprehensions are calls in older releases of Python.
            if _PACKAGE in code.co_filename and not code.co_name.endswith("comp>"):
                name = code.co_qualname.replace(".<locals>", "")
                stack.append(f"{name} in horovod_sparse/{code.co_filename.rpartition(_PACKAGE)[2]}")
            above = above.f_back
        found.update(dict.fromkeys(reversed(stack)))

    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(None)
    return [*found]


def lists() -> dict[str, list[str]]:
    """Return the calls from a gradient to its message, and from all workers' messages to `.grad`."""
    os.environ |= {"HOROVOD_SPARSE_FORCE": "1", "OMP_NUM_THREADS": "1"}
    import torch

    import horovod_sparse.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(600, 500, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compression = hvd.SIDCo(0.01, warmup=None)
    distributed = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    data = torch.randn(8, 600)
    for _ in range(3):
        # The first step is held back until all ranks have agreed.
        distributed.zero_grad()
        loss = model(data).square().mean()
        there, back = traced(_THERE, loss.backward), traced(_BACK, distributed.step)
    return {"from the gradient to the message": there, "from all messages to `.grad`": back}


if __name__ == "__main__":
    for title, calls in lists().items():
        files = len({call.rpartition(" in ")[2] for call in calls})
        print(f"{title}, {len(calls)} calls in {files} files:", *calls, "", sep="\n")
