"""Train for many steps, with saved states and a changing learning rate, and print what must not grow.

    mpirun -np 4 --oversubscribe python benchmarks/soak.py

Every rank trains three models at once, compressed by SIDCo, MiCRO and DGC. Memory and file descriptors are looked at after
every save. The script fails if memory grows by more than 1 % after the first tenth, if the file descriptors grow, if the
replicas differ at the end, or if a residual's norm in the last tenth exceeds twice its largest one before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import machine
import torch
from torch import nn
from torch.nn import functional as F

import horovod_sparse.torch as hvd

WARM_UP = 0.1
"""The part of the steps after which memory must be flat."""
GROWTH = 1.01
NORM = 2.0


@dataclass
class Training:
    """One model, its optimizer and its compressor, and the norms of its residual over time."""

    name: str
    compression: Any
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model.named_parameters(), compression=self.compression)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, 1000)

    def state(self) -> list[Any]:
        """What a rank saves of it."""
        return [one.state_dict() for one in (self.model, self.optimizer, self.scheduler, self.compression)]

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()
        self.scheduler.step()

    @property
    def largest_norms(self) -> tuple[float, float]:
        """The residual's largest norm before the last tenth, and in it."""
        tenth = max(1, len(self.norms) // 10)
        return max(self.norms[:-tenth]), max(self.norms[-tenth:])


class Sample(NamedTuple):
    """What a rank uses after it has saved its states."""

    step: int
    memory: int
    files: int


def sample(step: int) -> Sample:
    # What was freed goes back to the system first: what is left is in use.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(step, pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")))


def train(trainings: list[Training], steps: int, every: int, folder: Path) -> tuple[Sample, Sample]:
    """Train, and return what this rank uses at the end of the warm-up and at the end."""
    generator = torch.Generator().manual_seed(hvd.rank())
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    samples = []
    for step in range(1, steps + 1):
        inputs = torch.randn(16, 64, generator=generator)
        labels = (inputs @ teacher + torch.randn(16, 10, generator=generator)).argmax(1)
        for training in trainings:
            training.step(inputs, labels)
        if step % every == 0:
            torch.save([training.state() for training in trainings], folder / f"rank-{hvd.rank()}.pt")
            for training in trainings:
                training.norms.append(training.compression.stats().last.total.residual_norm)
            samples.append(sample(step))
            if hvd.rank() == 0:
                print(f"step {step}: {samples[-1].memory / 2**20:.1f} MiB, {samples[-1].files} files", flush=True)
    return next(one for one in samples if one.step > WARM_UP * samples[-1].step), samples[-1]


def problems(trainings: list[Training], warm: Sample, end: Sample) -> list[str]:
    """Return what must not be, on this rank."""
    found = []
    if end.memory > GROWTH * warm.memory:
        found.append(f"memory grew from {warm.memory} to {end.memory} bytes")
    if end.files > warm.files:
        found.append(f"file descriptors grew from {warm.files} to {end.files}")
    for training in trainings:
        before, last = training.largest_norms
        if not (math.isfinite(last) and last <= NORM * before):
            found.append(f"{training.name}'s residual has norm {last}, at most {before} before")
        bits = hvd.allgather_object([p.detach().numpy().tobytes() for p in training.model.parameters()])
        if any(theirs != bits[0] for theirs in bits):
            found.append(f"{training.name}'s replicas differ")
    return found


def report(trainings: list[Training], used: list[tuple[Sample, Sample]], seconds: float) -> str:
    growth = ", ".join(f"{100 * (end.memory / warm.memory - 1):+.2f} %" for warm, end in used)
    files = ", ".join(f"{warm.files} to {end.files}" for warm, end in used)
    warm, end = used[0]
    norms = "; ".join(f"{one.name} {one.largest_norms[0]:.3g}, {one.largest_norms[1]:.3g}" for one in trainings)
    return (
        f"{end.step} steps on {len(used)} ranks in {seconds / 60:.0f} minutes, {machine.describe()}\n"
        f"memory per rank, from step {warm.step} to the end: {growth}; file descriptors: {files}\n"
        f"largest norm of a residual before the last tenth, and in it: {norms}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=500, help="steps from one save to the next")
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    trainings = [Training(one.__name__, one(ratio=0.01)) for one in (hvd.SIDCo, hvd.MiCRO, hvd.DGC)]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        used = train(trainings, arguments.steps, arguments.every, Path(folder))
    seconds = time.perf_counter() - began
    everyone = hvd.allgather_object((used, problems(trainings, *used)))
    if any(found for _, found in everyone):
        raise RuntimeError(f"problems of the ranks: {[found for _, found in everyone]}")
    if hvd.rank() == 0:
        print(report(trainings, [used for used, _ in everyone], seconds))


if __name__ == "__main__":
    main()
