"""A training in which one rank raises, exits or is killed at a chosen moment. It never ends well.

python -m parallel.faults MOMENT ACTION FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import horovod.torch as hvd
import torch

from horovod_sparse.core import checkpoint
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.torch import SIDCo, reducer, save_checkpoint
from horovod_sparse.torch.reducer import Reducer

from .common import BUCKET_BYTES, loss_of, small_model
from .injected import FAULTY_STEP, STEPS, VICTIM, Fault, Faulty, wait_for


class LateHook:
    """Lets the fault happen in a hook when the others wait in `synchronize` for what this rank has not sent."""

    def __init__(self, faulty: Faulty, waiting: Path) -> None:
        self._faulty = faulty
        self._waiting = waiting
        """Made by the others when they wait."""

    def __call__(self, gradient: torch.Tensor) -> None:
        if self._faulty.armed and self._faulty.rank == VICTIM:
            wait_for(self._waiting)
        self._faulty.happen()

    def announce(self) -> None:
        """Let the others say that they wait."""
        complete = Pipeline.complete

        def call(pipeline: Pipeline, *args: Any) -> None:
            if self._faulty.armed:
                self._waiting.touch()
            complete(pipeline, *args)

        patch.object(Pipeline, "complete", call).start()


class FaultySGD(torch.optim.SGD):
    """Has its fault when gradients have been reduced."""

    faulty: Faulty | None = None

    def step(self, closure: Any = None) -> Any:
        if self.faulty is not None:
            self.faulty.happen()
        return super().step(closure)


def main(fault: Fault, folder: Path) -> None:
    torch.set_num_threads(1)
    faulty = Faulty(fault, hvd.rank())
    model = small_model()
    sgd = FaultySGD(model.parameters(), lr=0.05)
    compression = SIDCo(0.01, granularity=BUCKET_BYTES, warmup=None)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=compression)
    if fault.moment == "hook":
        model.get_parameter("2.weight").register_hook(lambda gradient: faulty.happen())
    elif fault.moment == "synchronize":
        # The last weight in backward: other buckets of this rank are under way.
        hook = LateHook(faulty, folder / "waiting")
        model.get_parameter("0.weight").register_hook(hook)
        hook.announce()
    elif fault.moment == "exchange":
        faulty.before(Reducer, "_start")
    elif fault.moment == "agreement":
        faulty.before(reducer, "description")
    elif fault.moment == "checkpoint":
        faulty.before(checkpoint, "_write")
    elif fault.moment == "optimizer":
        FaultySGD.faulty = faulty
    for step in range(STEPS):
        faulty.armed = step == (0 if fault.moment == "agreement" else FAULTY_STEP)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        save_checkpoint(folder, step, keep=1, model=model, optimizer=optimizer)
    print("trained to the end")


if __name__ == "__main__":
    hvd.init()
    main(Fault(sys.argv[1], sys.argv[2]), Path(sys.argv[3]))
