"""A training that saves checkpoints, resumes by itself, and may kill itself at a random moment.

python -m parallel.killed FOLDER STEPS [SEED]

With SEED, one rank gets SIGKILL at a random moment of one of its first steps. At the end every rank prints a digest of
everything that it keeps.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import Tensor

from horovod_sparse.torch import DGC, MiCRO, SIDCo, load_checkpoint, save_checkpoint

from .checkpoints import Training
from .common import BUCKET_BYTES, digest

EVERY = 2
"""Steps from one checkpoint to the next."""
FIRST = 6
"""The kill begins in one of so many steps."""
LONGEST = 0.1
"""Seconds from there to the signal, at most; a step with its checkpoint takes about as long."""


def residuals(trainings: dict[str, Training]) -> dict[str, Tensor]:
    """All residuals and velocities of this rank, but not velocities that are the same on every rank."""
    states = {part: training.compression.state_dict() for part, training in trainings.items()}
    return {
        f"{part}.{kind}.{name}": array
        for part, state in states.items()
        for kind in ("residuals", "velocities")
        for name, array in sorted(state[kind].items())
        if name in state["residuals"]
    }


def report(what: str, residuals: dict[str, Tensor]) -> None:
    """Print, once, two numbers for each residual's sum over all ranks."""
    for name, residual in residuals.items():
        total = hvd.allreduce(residual.double(), op=hvd.Sum, name=name)
        if hvd.rank() == 0:
            print(f"{what} {name} {float(total.sum()):.6f} {float(total.norm()):.6f}", flush=True)


def killer(seed: int | None, start: int) -> Callable[[int], None]:
    """What begins a step. The rank that the seed chooses is killed soon after it has begun one of the first steps."""
    chosen = random.Random(seed)
    victim, moment = chosen.randrange(hvd.size()), start + chosen.randrange(FIRST)
    seconds = chosen.uniform(0.0, LONGEST)

    def begin(step: int) -> None:
        if seed is not None and (hvd.rank(), step) == (victim, moment):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    return begin


def main(folder: Path, steps: int, seed: int | None) -> None:
    # One checkpoint holds several models and optimizers.
    trainings = {
        "sidco": Training(SIDCo(0.01, granularity=BUCKET_BYTES, warmup=None)),
        "micro": Training(MiCRO(0.01, granularity=BUCKET_BYTES, warmup=None)),
        "dgc": Training(DGC(0.01, granularity=BUCKET_BYTES, warmup=None, updates=False)),
    }
    objects = {f"{part}_{name}": one for part, made in trainings.items() for name, one in made.objects.items()}
    start = load_checkpoint(folder, **objects).step
    print(f"rank {hvd.rank()} of {hvd.size()} begins at step {start}", flush=True)
    report("loaded", residuals(trainings))
    begin = killer(seed, start)
    for step in range(start, steps):
        begin(step)
        if step % EVERY == 0:
            report("saved", residuals(trainings))
            save_checkpoint(folder, step, keep=2, **objects)
        for training in trainings.values():
            training.train(1)
    kept = [one for training in trainings.values() for one in training.model.state_dict().values()]
    print(f"rank {hvd.rank()} ended with {digest([*kept, *residuals(trainings).values()])}", flush=True)


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
