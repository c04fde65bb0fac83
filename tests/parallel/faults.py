"""A training in which one rank raises, exits or is killed at a chosen moment. It never ends well.

python -m tests.parallel.faults MOMENT ACTION FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from horovod_sparse.core.driver import Driver
from horovod_sparse.torch import SIDCo, horovod
from horovod_sparse.torch.exchange import Collectives

from .common import BUCKET_BYTES, loss_of, small_model, wrap
from .injected import FAULTY_STEP, STEPS, VICTIM, Fault, before, wait_for

CALLS: dict[str, tuple[Any, str]] = {
    "exchange": (Collectives, "start"),
    "agreement": (horovod, "description"),
    # Horovod's optimizer calls it when gradients have been reduced.
    "optimizer": (torch.optim.SGD, "step"),
}
"""Before which call of the package or of PyTorch the fault of a moment happens."""


def main(fault: Fault, folder: Path) -> None:
    torch.set_num_threads(1)
    model = small_model()
    optimizer = wrap(model, SIDCo(0.01, granularity=BUCKET_BYTES, warmup=None))
    step, waiting = 0, folder / "waiting"

    def late(gradient: torch.Tensor) -> None:
        """Let it happen when the others wait in `synchronize` for what this rank has not sent."""
        if fault.armed:
            wait_for(waiting)
        fault.happen()

    def announce() -> None:
        if step == FAULTY_STEP:
            waiting.touch()

    if fault.moment == "hook":
        model.get_parameter("2.weight").register_hook(lambda gradient: fault.happen())
    elif fault.moment == "synchronize":
        # The last weight in backward: other buckets of this rank are under way.
        model.get_parameter("0.weight").register_hook(late)
        before(Driver, "complete", announce)
    else:
        before(*CALLS[fault.moment], fault.happen)
    for step in range(STEPS):
        fault.armed = hvd.rank() == VICTIM and step == (0 if fault.moment == "agreement" else FAULTY_STEP)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    print("trained to the end")


if __name__ == "__main__":
    hvd.init()
    main(Fault(sys.argv[1], sys.argv[2]), Path(sys.argv[3]))
