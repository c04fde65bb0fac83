"""Time whole training steps, dense and sparse, in turns, beside what else one could pick; under any launcher.

    mpirun -np 2 python benchmarks/step_time.py
    mpirun -np 2 python benchmarks/step_time.py --rows "SIDCo 0.01" --compression mine:RMSThreshold
    mpirun -np 2 python benchmarks/step_time.py --model many --parameters 5000 --elements 20 --rows "dense fp32" "SIDCo 0.001"
    sudo .venv/bin/python benchmarks/hosts.py --hosts 2 --rate 1gbit -- .venv/bin/python benchmarks/step_time.py --model linear

In every round each contender makes one step on the same data, so that a disturbance hits all alike. Prints one table; fails
unless the workers' parameters are the same, bit by bit, for every contender after the last step.

A unit is the time of `residual.add_(gradient)` for as many elements as the model has, which all workers measure at once in
every round. "Passes" is how often a selection reads its whole bucket, beside the pass that adds the gradients.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import machine
import markdown
import torch
from passes import Passes, sizes_of
from step_contenders import ADAMW_ALONE, ALONE, CONTENDERS, DENSE, FSDP_ALONE, MODELS, SPARSE, Task, sparse
from torch import nn
from tqdm import tqdm

import horovod_sparse.torch as hvd
from horovod_sparse.compressors.base import BUCKET_BYTES

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import common
from own import bound, own_class

SETTLING = 40
"""Rounds that are neither timed nor counted: residuals and thresholds grow, and Horovod learns the messages."""
WARMING = 5
"""Of these, those that a contender without residuals takes part in. Dense steps take long on a slow network."""


@dataclass
class Contender:
    """One way of exchanging gradients, with a model of its own."""

    name: str
    task: Task
    model: nn.Module
    optimizer: Any
    compression: Any
    """None if nobody tells what is sent."""
    seconds: list[float] = field(default_factory=list)
    settled_at: tuple[float, float] = (0.0, 0.0)
    """What `entries` returned before the first timed step."""
    sizes: dict[int, int] = field(default_factory=dict)
    """What `passes.sizes_of` returned before the first timed step."""
    passes: float = 0.0
    """How often selections have read whole buckets in the timed steps."""

    def settle(self) -> None:
        """Time and count from now on."""
        self.seconds.clear()
        self.passes = 0.0
        self.sizes = sizes_of(self.compression) if self.settles else {}
        self.settled_at = self.entries()

    @property
    def settles(self) -> bool:
        """Whether it has residuals that grow at first."""
        return hasattr(self.compression, "stats")

    def entries(self) -> tuple[float, float]:
        """Return how many entries were asked for and sent in all steps so far; zeros for a contender without statistics."""
        if not self.settles:
            return 0.0, 0.0
        stats = self.compression.stats()
        return stats.steps * stats.mean.total.target, stats.steps * stats.mean.total.count

    def step(self, batch: Any, counter: Passes) -> None:
        """One training step, timed."""
        counter.count, counter.sizes = 0.0, self.sizes
        started = time.perf_counter()
        self.optimizer.zero_grad()
        self.task.loss(self.model, batch).backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - started)
        self.passes += counter.count


def quartiles(seconds: list[float]) -> list[float]:
    """In milliseconds."""
    return [1000 * one for one in statistics.quantiles(seconds, n=4, method="inclusive")]


def contenders_of(args: argparse.Namespace, task: Task) -> Iterator[Contender]:
    """All contenders that were asked for, whose models start alike; sparse ones once for each size of the buckets."""
    sizes = {f", buckets of {mib:g} MiB": int(mib * 2**20) for mib in args.bucket_mib} or {"": BUCKET_BYTES}
    own = {f"{cls.__name__} 0.01": partial(sparse, partial(bound(cls, hvd), 0.01)) for cls in args.compression}
    for name, make in (CONTENDERS | own).items():
        between_hosts = name.startswith("FSDP") or name.endswith("between hosts")
        # Rows of AdamW are compared with its own computation.
        wanted = {ALONE, DENSE, *args.rows, *own} | {ADAMW_ALONE for row in args.rows if row.startswith("AdamW")}
        if name not in wanted or (between_hosts and hvd.size() == hvd.local_size()):
            continue
        for suffix, granularity in sizes.items() if name in SPARSE or name in own else [("", BUCKET_BYTES)]:
            torch.manual_seed(0)
            model = task.model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            yield Contender(name + suffix, task, *make(model, optimizer, {"granularity": granularity}))


def check(contender: Contender) -> None:
    """Raise unless all workers hold the same parameters, and a sparse contender sent about as many entries as asked.

    The steps before the timed ones do not count. In these, MiCRO sends up to twice as many, because the threshold that it needs
    becomes several times as large while residuals grow, and its controller follows that in small steps.
    """
    if contender.name in (ALONE, FSDP_ALONE, ADAMW_ALONE):
        return
    if isinstance(contender.optimizer, hvd.LocalUpdates):
        contender.optimizer.synchronize()
    parameters = {name: whole(parameter).numpy() for name, parameter in contender.model.named_parameters()}
    try:
        common.check_replicas(parameters, hvd.allgather_object)
    except RuntimeError as error:
        raise RuntimeError(f"{contender.name}: {error}") from error
    target, sent = (now - before for now, before in zip(contender.entries(), contender.settled_at, strict=True))
    if not 0.5 * target <= sent <= 1.5 * target:
        steps = len(contender.seconds)
        raise RuntimeError(
            f"{contender.name} sent {sent / steps:.0f} entries per timed step, {target / steps:.0f} were asked for"
        )


def whole(parameter: Any) -> torch.Tensor:
    """A parameter, gathered from its shards if there are any."""
    tensor: torch.Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return tensor.detach()


def table(contenders: Iterable[Contender], parameters: int, unit: float) -> str:
    """Markdown; `unit` in milliseconds."""
    medians = {contender.name: quartiles(contender.seconds)[1] for contender in contenders}
    header = ["exchange", "bytes sent per step and worker", "step, ms: median (quartiles)", "beyond computation, ms"]
    rows = []
    for contender in contenders:
        low, middle, high = quartiles(contender.seconds)
        sent = "" if contender.name in (ALONE, ADAMW_ALONE) else "not counted"
        if contender.compression is not None:
            sent = f"{common.measure_traffic(contender.compression, parameters, hvd).bytes_per_step:,.0f}"
        beyond = middle - medians[ADAMW_ALONE if contender.name.startswith("AdamW") else ALONE]
        cells = [contender.name, sent, f"{middle:.1f} ({low:.1f}–{high:.1f})", f"{beyond:.1f}"]
        selections = len(contender.sizes) * len(contender.seconds)
        read = f"{contender.passes / selections:.2f}" if selections else ""
        rows.append([*cells, f"{beyond / unit:.1f}", f"{medians[DENSE] / middle:.2f}", read])
    return markdown.table([*header, "in units", "dense fp32's / it", "passes"], rows)


def parse() -> argparse.Namespace:
    parser = machine.parser(__doc__)
    add = parser.add_argument
    models = "; ".join(f"{name}: {make.__doc__}" for name, make in MODELS.items())
    add("--model", choices=MODELS, default="linear", help=models)
    rows = f"beside {ALONE!r} and {DENSE!r}"
    add("--rows", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="ROW", help=rows)
    text = "compressors of one's own, module:Class: rows at ratio 0.01"
    add("--compression", type=own_class, nargs="+", default=[], metavar="CLASS", help=text)
    add("--rounds", type=int, default=100, help="timed steps of each contender")
    add("--bucket-mib", type=float, nargs="+", default=[], metavar="MIB", help="of sparse contenders, a row for each")
    add("--batch-size", type=int, default=2, help="samples per worker and step")
    add("--width", type=int, default=256, help="of linear")
    add("--layers", type=int, default=3, help="of linear")
    add("--parameters", type=int, default=1000, help="of many")
    add("--elements", type=int, default=10_000, help="of each parameter of many")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {args.rounds}")
    return args


def main() -> None:
    args = parse()
    hvd.init()
    task = MODELS[args.model](args)
    contenders = list(contenders_of(args, task))
    numel = sum(parameter.numel() for parameter in contenders[0].model.parameters())
    residual, gradient = torch.zeros(numel), torch.zeros(numel)
    generator = torch.Generator().manual_seed(hvd.rank())
    quiet = hvd.rank() != 0
    units: list[float] = []
    counter = Passes()
    for number in tqdm(range(SETTLING + args.rounds), desc="rounds", disable=quiet, leave=False):
        batch = task.batch(generator)
        for contender in contenders:
            if number == SETTLING:
                contender.settle()
            if number < SETTLING - WARMING and not contender.settles:
                continue
            # Nobody's step waits for a worker that is still in the step before.
            hvd.barrier()
            contender.step(batch, counter)
        hvd.barrier()
        started = time.perf_counter()
        residual.add_(gradient)
        units.append(time.perf_counter() - started)
    for contender in contenders:
        check(contender)
    if not quiet:
        unit = quartiles(units)[1]
        print(
            f"{task.title}: {numel:,} parameters, {hvd.size()} workers on {hvd.size() // hvd.local_size()} hosts; "
            f"{args.rounds} rounds; a unit is {unit:.2f} ms: {12e-6 * numel / unit:.0f} GB/s\n"
            f"{machine.describe()}, {torch.get_num_threads()} threads per worker, "
            f"Python {platform.python_version()}, PyTorch {torch.__version__}\n"
        )
        print(table(contenders, numel, unit), flush=True)


if __name__ == "__main__":
    main()
