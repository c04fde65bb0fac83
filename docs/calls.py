"""Write the calls that a gradient passes through in one real step to CONTRIBUTING.md.

    python docs/calls.py [--check]

One process makes a step of a model with one parameter. `sys.setprofile` looks at the stack whenever the data is read or
written: in an operation on the arrays, in the algorithm, and in Horovod. A function of the package counts if it is on one of
these stacks. With `--check` nothing is written, and the exit status is 1 if the page differs. Needs Python 3.11, which knows
the full names of functions.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"
_LIST = re.compile(r"(<!-- calls: (there|back) -->\n).*?(?=<!-- end -->)", re.DOTALL)
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
                stack.append(f"`{name}` in `horovod_sparse/{code.co_filename.rpartition(_PACKAGE)[2]}`")
            above = above.f_back
        found.update(dict.fromkeys(reversed(stack)))

    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(None)
    return [*found]


def lists() -> dict[str, list[str]]:
    """Return the calls from gradient to message (there), and from message to `.grad` (back)."""
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
    return {"there": there, "back": back}


def updated(text: str) -> str:
    """Return the text of the page with the lists as they are now."""
    found = lists()

    def written(match: re.Match[str]) -> str:
        calls = found[match[2]]
        files = len({call.rpartition(" in ")[2] for call in calls})
        numbered = "\n".join(f"{number}. {call}" for number, call in enumerate(calls, 1))
        return f"{match[1]}{len(calls)} calls in {files} files:\n\n{numbered}\n\n"

    return _LIST.sub(written, text)


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = updated(before)
    if sys.argv[1:] == ["--check"]:
        raise SystemExit(int(after != before))
    PAGE.write_text(after, encoding="utf-8")
