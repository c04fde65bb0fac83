"""Time whole training steps, dense and sparse, in turns: the character model, under any launcher.

    mpirun -np 2 python benchmarks/step_time.py
    sudo .venv/bin/python benchmarks/hosts.py --hosts 2 --rate 1gbit -- .venv/bin/python benchmarks/step_time.py

In every round each contender makes one step on the same data, so that a disturbance hits all alike. Prints one table; fails
unless the workers' parameters are the same, bit by bit, for every contender after the last step.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import horovod_sparse.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import common
import torch_charlm

SETTLING = 20
"""Rounds that are not timed: thresholds settle, and Horovod learns the messages."""


@dataclass
class Contender:
    """One way of exchanging gradients, with a model of its own; without a compression nothing is exchanged."""

    name: str
    compression: Any
    model: nn.Module
    optimizer: Any
    seconds: list[float] = field(default_factory=list)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """One training step, timed."""
        started = time.perf_counter()
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x).flatten(0, 1), y.flatten()).backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - started)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Of the steps, in milliseconds."""
        low, middle, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return 1000 * low, 1000 * middle, 1000 * high


def make(name: str, compression: Any, args: argparse.Namespace) -> Contender:
    """A contender whose model starts as all others do."""
    torch.manual_seed(0)
    model = torch_charlm.CharLM(args.context, args.width, args.layers, args.heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if compression is not None:
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    return Contender(name, compression, model, optimizer)


def check(contender: Contender) -> None:
    """Raise unless all workers hold the same parameters, and a sparse contender sent about as many entries as asked."""
    if contender.compression is None:
        return
    parameters = {name: parameter.detach().numpy() for name, parameter in contender.model.named_parameters()}
    common.check_replicas(parameters, hvd.allgather_object)
    if hasattr(contender.compression, "stats"):
        total = contender.compression.stats().mean.total
        if not 0.5 * total.asked <= total.count <= 1.5 * total.asked:
            raise RuntimeError(
                f"{contender.name} sent {total.count:.0f} entries per step, {total.asked:.0f} were asked for"
            )


def table(contenders: list[Contender], parameters: int) -> str:
    """Markdown."""
    dense = next(contender for contender in contenders if contender.compression is hvd.Compression.none)
    lines = ["| exchange | bytes sent per step and worker | step, ms: median (quartiles) | dense fp32's / it |"]
    lines.append("|---|---|---|---|")
    for contender in contenders:
        low, middle, high = contender.quartiles
        sent = 0.0
        if contender.compression is not None:
            sent = common.measure_traffic(contender.compression, parameters, hvd).bytes_per_step
        faster = dense.quartiles[1] / middle
        lines.append(f"| {contender.name} | {sent:,.0f} | {middle:.1f} ({low:.1f}–{high:.1f}) | {faster:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=100, help="timed steps of each contender")
    add("--batch-size", type=int, default=2, help="samples per worker and step")
    add("--context", type=int, default=32)
    add("--width", type=int, default=256)
    add("--layers", type=int, default=3)
    add("--heads", type=int, default=4)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {args.rounds}")
    hvd.init()
    contenders = [
        make("none: computation alone", None, args),
        make("dense fp32", hvd.Compression.none, args),
        make("dense fp16", hvd.Compression.fp16, args),
        make("SIDCo 0.01", hvd.SIDCo(ratio=0.01), args),
        make("SIDCo 0.001", hvd.SIDCo(ratio=0.001), args),
    ]
    generator = torch.Generator().manual_seed(hvd.rank())
    quiet = hvd.rank() != 0
    for number in tqdm(range(SETTLING + args.rounds), desc="rounds", disable=quiet, leave=False):
        windows = torch.randint(torch_charlm.CHARACTERS, (args.batch_size, args.context + 1), generator=generator)
        for contender in contenders:
            if number == SETTLING:
                contender.seconds.clear()
            # Nobody's step waits for a worker that is still in the step before.
            hvd.barrier()
            contender.step(windows[:, :-1], windows[:, 1:])
    for contender in contenders:
        check(contender)
    if not quiet:
        numel = sum(parameter.numel() for parameter in contenders[0].model.parameters())
        print(
            f"{numel:,} parameters, {hvd.size()} workers on {hvd.size() // hvd.local_size()} hosts; "
            f"{args.rounds} rounds, {args.batch_size} x {args.context} characters per worker and step\n"
            f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads per worker, "
            f"Python {platform.python_version()}, PyTorch {torch.__version__}\n"
        )
        print(table(contenders, numel), flush=True)


if __name__ == "__main__":
    main()
