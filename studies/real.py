"""What each way to exchange costs in loss and in errors on real tasks, beside dense averaging; workers of torch.distributed.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 studies/real.py train words
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 studies/real.py train mnist --optimizer sgd --rows "SIDCo 0.01" "fp16"
    python studies/real.py tables

Each worker draws samples of its own part of the data. All rows have the same seeds and learning rate, and the compressor's own
warm-up. Each run is a line of the log, and is not repeated while its line is there. `tables` prints the held-out loss beside
dense training, in percent, how many dense exchanges have as many bytes as a worker has sent, how many bits that is for each
parameter and step, and the errors of the task.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import around  # noqa: F401  (benchmarks can be imported after it)
import markdown
import torch
import torch.distributed as dist
from diloco import DiLoCo, over_a_group
from tasks import ADAMW, CELLS, DENSE, SGD, TASKS, Log, Task, cells, rate_at
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.exchange.cost import allreduce_bytes
from horovod_sparse.torch import LocalUpdates, Pairs, SIDCo, TopK, register

Optimizer = torch.optim.Optimizer
ONE_BUCKET = 1 << 20
"""MB of a bucket of DDP: with several, PowerSGD's callbacks race over Gloo."""


@dataclass(frozen=True)
class Way:
    """How workers train together: what a step calls, and what it has sent."""

    model: nn.Module
    """What the forward pass calls."""
    step: Callable[[], object]
    exchanges: Callable[[int], float]
    """After so many steps: dense exchanges with as many bytes as a worker has sent."""
    block: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """What is around forward and backward."""
    end: Callable[[], object] = lambda: None


Make = Callable[[nn.Module, Optimizer], Way]
NAMES = {ADAMW: "AdamW", SGD: "SGD with momentum"}


def dense(model: nn.Module, optimizer: Optimizer) -> Way:
    return Way(DistributedDataParallel(model), optimizer.step, float)


def half(model: nn.Module, optimizer: Optimizer) -> Way:
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return Way(parallel, optimizer.step, lambda steps: steps / 2)


def power(rank: int, model: nn.Module, optimizer: Optimizer) -> Way:
    parallel = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET)
    first = 10
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=first)
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def exchanges(steps: int) -> float:
        # PyTorch counts the entries before and after the compression, of the steps that are compressed.
        _, before, after = state.compression_stats()
        return first + (steps - first) * after / before

    return Way(parallel, optimizer.step, exchanges)


def sent(compression: Any, model: nn.Module) -> float:
    stats = compression.stats()
    total = stats.steps * (stats.mean.total.bytes_sent + stats.mean.dense_bytes_sent)
    return total / allreduce_bytes(4 * sum(one.numel() for one in model.parameters()), dist.get_world_size())


def plain(ratio: float, ahead: float, model: nn.Module, optimizer: Optimizer) -> Way:
    parallel, compression = DistributedDataParallel(model), SIDCo(ratio)
    register(parallel, compression, optimizer)
    block = partial(compression.ahead, parallel, ahead) if ahead else contextlib.nullcontext
    return Way(parallel, optimizer.step, lambda _: sent(compression, model), block)


def local(compression: Callable[[], Any], every: int, ahead: float, model: nn.Module, optimizer: Optimizer) -> Way:
    updates = LocalUpdates(optimizer, model, compression(), every=every)
    block = partial(updates.ahead, ahead) if ahead else contextlib.nullcontext
    return Way(model, updates.step, lambda _: sent(updates.compression, model), block, updates.synchronize)


def outer(every: int, model: nn.Module, optimizer: Optimizer) -> Way:
    updates = DiLoCo(optimizer, model, every=every, outer_lr=0.7, outer_momentum=0.9, average=over_a_group)
    return Way(model, updates.step, lambda steps: steps // every)


def packed(ratio: float) -> Any:
    return SIDCo(ratio, exchange=Pairs("packed"))


ROWS: dict[str, Make] = {
    DENSE: dense,
    "fp16": half,
    "PowerSGD 4": partial(power, 4),
    "SIDCo 0.01": partial(plain, 0.01, 0.0),
    "SIDCo 0.001": partial(plain, 0.001, 0.0),
    "SIDCo 0.01, ahead": partial(plain, 0.01, 0.5),
    "local, SIDCo 0.01": partial(local, partial(packed, 0.01), 1, 0.0),
    "local, SIDCo 0.01, ahead": partial(local, partial(packed, 0.01), 1, 0.5),
    "local, SIDCo 0.001": partial(local, partial(packed, 0.001), 1, 0.0),
    "local, TopK 0.03, every 5": partial(local, lambda: TopK(0.03, exchange=Pairs("packed")), 5, 0.0),
    "DiLoCo, every 15": partial(outer, 15),
}
"""`LocalUpdates` sends packed pairs. PyTorch's hook for bfloat16 refuses Gloo."""


def make_optimizer(name: str, model: nn.Module, rate: float) -> Optimizer:
    if name == SGD:
        return torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), rate, weight_decay=0.1)


def train(task: Task, optimizer_name: str, row: str, rate: float, steps: int, seed: int) -> dict[str, float]:
    """The held-out loss and the errors after the training, and the bytes of a worker in dense exchanges."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = task.make()
    optimizer = make_optimizer(optimizer_name, model, rate)
    way = ROWS[row](model, optimizer)
    parts, held_out = task.data.split(world)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, rate)
        x, y = task.data.draw(parts[rank], generator)
        optimizer.zero_grad()
        with way.block():
            task.data.loss(way.model(x), y).backward()
        way.step()
    way.end()
    model.eval()
    result = {"loss": task.data.evaluate(model, held_out), "exchanges": way.exchanges(steps)}
    return result | task.data.errors(model, held_out)


class Key(NamedTuple):
    """What a line of the log is of."""

    task: str
    optimizer: str
    rate: str
    row: str
    workers: int
    steps: int
    seed: int

    @property
    def title(self) -> str:
        return " | ".join(map(str, self))

    @classmethod
    def of(cls, title: str) -> Key:
        task, optimizer, rate, row, workers, steps, seed = title.split(" | ")
        return cls(task, optimizer, rate, row, int(workers), int(steps), int(seed))


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task, log = TASKS[args.task], Log(args.results)
    rate = args.rate or task.rates[args.optimizer][0]
    # All seeds of a row follow each other, and dense training comes first: its lines are what the others stand beside.
    for steps, row, seed in itertools.product(args.steps, dict.fromkeys([DENSE, *args.rows]), range(args.seeds)):
        key = Key(args.task, args.optimizer, f"{rate:g}", row, dist.get_world_size(), steps, seed)
        # All workers have read the same log.
        dist.barrier()
        if key.title in log.known:
            continue
        found = train(task, args.optimizer, row, rate, steps, seed)
        if dist.get_rank() == 0:
            log.run(key.title, found.copy)
            print(key.title, found, flush=True)
    dist.destroy_process_group()


def tables(log: Path) -> str:
    """A table for each task, optimizer, rate, length and number of workers."""
    known = {Key.of(title): found for title, found in Log(log).known.items()}
    texts = []
    for setting in dict.fromkeys((one.task, one.optimizer, one.rate, one.workers, one.steps) for one in known):
        task, optimizer, rate, workers, steps = setting
        lines = []
        errors: list[str] = []
        dense: dict[int, float] = {}
        for row in ROWS:
            found = {
                key.seed: result
                for key, result in known.items()
                if (key.task, key.optimizer, key.rate, key.workers, key.steps) == setting and key.row == row
            }
            if not found:
                continue
            dense = dense or {seed: result["loss"] for seed, result in found.items()}
            results = [*found.values()]
            errors = [name for name in results[0] if name not in ("loss", "exchanges")]
            bits = 32 * statistics.fmean(result["exchanges"] for result in results) / steps
            means = [f"{statistics.fmean(result[name] for result in results):.2f}" for name in errors]
            lines.append([row, *cells(results, [dense[seed] for seed in found]), f"{bits:.2f}", *means])
        title = f"{task}, {NAMES[optimizer]} with rate {rate}, {workers} workers, {steps} steps, {len(dense)} seeds"
        texts.append(f"{title}:\n\n{markdown.table(['row', *CELLS, 'bits', *errors], lines, 1)}")
    return "\n\n".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="under torchrun")
    training.add_argument("task", choices=[name for name, task in TASKS.items() if hasattr(task.data, "errors")])
    training.add_argument("--optimizer", choices=NAMES, default=ADAMW)
    training.add_argument("--rate", type=float, help="the learning rate; that of the task by default")
    training.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS], metavar="ROW", help="beside dense")
    training.add_argument("--steps", type=int, nargs="+", default=[2400])
    training.add_argument("--seeds", type=int, default=3)
    commands.add_parser("tables", help="print what is in the log")
    args = parser.parse_args()
    if args.command == "train":
        run(args)
    else:
        print(tables(args.results))


if __name__ == "__main__":
    main()
