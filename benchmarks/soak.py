"""Train for many steps, with checkpoints and a changing learning rate, and print what must not grow.

    mpirun -np 4 --oversubscribe python benchmarks/soak.py --output soak.md

Every rank trains three models at once, compressed by SIDCo, MiCRO and DGC. Memory and file descriptors are looked at after
every checkpoint. The script fails if memory grows by more than 1 % after the first tenth, if the file descriptors grow, if the
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
from typing import Any

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
        momentum = 0.0 if self.name == "DGC" else 0.9
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=momentum)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model.named_parameters(), compression=self.compression)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, 1000)

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()
        self.scheduler.step()

    @property
    def objects(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {f"{self.name}_{part}": one for part, one in parts.items()}


@dataclass(frozen=True)
class Sample:
    """What a rank uses after a checkpoint."""

    step: int
    memory: int
    files: int


def sample(step: int) -> Sample:
    # What was freed goes back to the system first: what is left is in use.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(step, pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")))


def train(trainings: list[Training], steps: int, every: int, folder: Path) -> list[Sample]:
    generator = torch.Generator().manual_seed(hvd.rank())
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    samples = []
    for step in range(1, steps + 1):
        inputs = torch.randn(16, 64, generator=generator)
        labels = (inputs @ teacher + torch.randn(16, 10, generator=generator)).argmax(1)
        for training in trainings:
            training.step(inputs, labels)
        if step % every == 0:
            objects = {name: one for training in trainings for name, one in training.objects.items()}
            hvd.save_checkpoint(folder, step, data=generator, **objects)
            for training in trainings:
                training.norms.append(training.compression.stats().last.total.residual_norm)
            samples.append(sample(step))
            if hvd.rank() == 0:
                print(f"step {step}: {samples[-1].memory / 2**20:.1f} MiB, {samples[-1].files} files", flush=True)
    return samples


def problems(trainings: list[Training], samples: list[Sample]) -> list[str]:
    """Return what must not be, on this rank."""
    warm = [one for one in samples if one.step > WARM_UP * samples[-1].step]
    found = []
    if warm[-1].memory > GROWTH * warm[0].memory:
        found.append(f"memory grew from {warm[0].memory} to {warm[-1].memory} bytes")
    if warm[-1].files > warm[0].files:
        found.append(f"file descriptors grew from {warm[0].files} to {warm[-1].files}")
    for training in trainings:
        tenth = max(1, len(training.norms) // 10)
        before, last = max(training.norms[:-tenth]), max(training.norms[-tenth:])
        if not (math.isfinite(last) and last <= NORM * before):
            found.append(f"{training.name}'s residual has norm {last}, at most {before} before")
        bits = hvd.allgather_object([p.detach().numpy().tobytes() for p in training.model.parameters()])
        if any(theirs != bits[0] for theirs in bits):
            found.append(f"{training.name}'s replicas differ")
    return found


def report(trainings: list[Training], everyone: list[list[Sample]], seconds: float) -> str:
    steps = everyone[0][-1].step
    warm = [[one for one in samples if one.step > WARM_UP * steps] for samples in everyone]
    growth = [f"{100 * (samples[-1].memory / samples[0].memory - 1):+.2f} %" for samples in warm]
    files = [f"{samples[0].files} to {samples[-1].files}" for samples in warm]
    rows = [
        f"{steps} steps on {len(everyone)} ranks in {seconds / 60:.0f} minutes, {machine.describe()}.",
        "",
        "| what | figure |",
        "|---|---|",
        f"| memory per rank, from step {warm[0][0].step} to the end | {', '.join(growth)} |",
        f"| file descriptors per rank | {', '.join(files)} |",
        "| replicas at the end | identical, bit for bit |",
    ]
    for training in trainings:
        tenth = max(1, len(training.norms) // 10)
        largest, last = max(training.norms), max(training.norms[-tenth:])
        rows.append(f"| {training.name}: norm of a residual | at most {largest:.3g}, {last:.3g} in the last tenth |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=500, help="steps from one checkpoint to the next")
    parser.add_argument("--output", type=Path, help="file for the table, in Markdown")
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    trainings = [
        Training("SIDCo", hvd.SIDCo(ratio=0.01)),
        Training("MiCRO", hvd.MiCRO(ratio=0.01)),
        Training("DGC", hvd.DGC(ratio=0.01)),
    ]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(hvd.broadcast_object(own, root_rank=0))
        samples = train(trainings, arguments.steps, arguments.every, folder)
        hvd.barrier()
    seconds = time.perf_counter() - began
    found = problems(trainings, samples)
    everyone = hvd.allgather_object((samples, found))
    if any(problems for _, problems in everyone):
        raise RuntimeError(f"problems of the ranks: {[problems for _, problems in everyone]}")
    if hvd.rank() == 0:
        table = report(trainings, [samples for samples, _ in everyone], seconds)
        print(table)
        if arguments.output is not None:
            arguments.output.write_text(table)


if __name__ == "__main__":
    main()
