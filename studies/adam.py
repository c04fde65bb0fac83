"""How well AdamW trains by local updates, beside dense averaging, on small tasks; real workers of torch.distributed.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 studies/adam.py charlm --steps 600 2400
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 studies/adam.py gpt2 --rows "every 1, ahead" "every 1, packed, ahead"

Each worker draws samples of its own part of the data. All rows have the same seeds and learning rate, and the compressor's own
warm-up. Dense training is PyTorch's DDP. Each run is a line of the log, and is not repeated while its line is there. Prints the
held-out loss beside dense training, in percent, and how many dense exchanges have as many bytes as a worker has sent. Task
"gpt2" needs Transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from pathlib import Path
from typing import NamedTuple

import around
import markdown
import torch
import torch.distributed as dist
from tasks import ADAMW, CELLS, DENSE, TASKS, Log, Task, cells, rate_at
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.exchange.cost import allreduce_bytes
from horovod_sparse.exchange.pairs import Values
from horovod_sparse.torch import LocalUpdates, Pairs, SIDCo


class Row(NamedTuple):
    """How movements are exchanged."""

    every: int = 1
    ahead: float = 0.0
    """The coefficient of `ahead`."""
    values: Values = "float32"
    """Of the pairs."""


ROWS = {
    "every 1": Row(),
    "every 1, ahead": Row(1, 0.5),
    "every 5": Row(5),
    "every 5, ahead": Row(5, 0.5),
    "every 1, packed": Row(1, 0.0, "packed"),
    "every 1, packed, ahead": Row(1, 0.5, "packed"),
    "every 5, packed": Row(5, 0.0, "packed"),
    "every 5, packed, ahead": Row(5, 0.5, "packed"),
}


def train(task: Task, row: str, rate: float, ratio: float, steps: int, seed: int) -> dict[str, float]:
    """The held-out loss after the training, and the bytes of a worker in dense exchanges."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = task.make()
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.1)
    every, ahead, values = ROWS.get(row, Row())
    compression = SIDCo(ratio, exchange=Pairs(values))
    local = None if row == DENSE else LocalUpdates(optimizer, model, compression, every=every)
    trained = DistributedDataParallel(model) if local is None else model
    parts, held_out = task.data.split(world)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, rate)
        x, y = task.data.draw(parts[rank], generator)
        optimizer.zero_grad()
        with local.ahead(ahead) if local is not None and ahead else contextlib.nullcontext():
            task.data.loss(trained(x), y).backward()
        (optimizer if local is None else local).step()
    exchanges = float(steps)
    if local is not None:
        local.synchronize()
        stats = compression.stats()
        sent = stats.steps * (stats.mean.total.bytes_sent + stats.mean.dense_bytes_sent)
        exchanges = sent / allreduce_bytes(4 * sum(parameter.numel() for parameter in model.parameters()), world)
    return {"loss": task.data.evaluate(model, held_out), "exchanges": exchanges}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS], metavar="ROW", help="beside dense")
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--steps", type=int, nargs="+", default=[600])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=around.ROOT / "build" / "adam.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, task, log = dist.get_world_size(), TASKS[args.task], Log(args.results)
    rate = task.rates[ADAMW][0]
    table: list[list[str]] = []
    dense: dict[int, list[float]] = {}
    for steps, row in itertools.product(args.steps, [DENSE, *args.rows]):
        results = []
        for seed in range(args.seeds):
            known = f"{args.task} {row}{'' if row == DENSE else f' {args.ratio:g}'} {world} {steps} {seed}"
            # All workers have read the same log.
            dist.barrier()
            found = log.known.get(known) or train(task, row, rate, args.ratio, steps, seed)
            if dist.get_rank() == 0:
                log.run(known, found.copy)
            log.known[known] = found
            results.append(found)
        losses = dense.setdefault(steps, [result["loss"] for result in results])
        table.append([str(world), str(steps), row, *cells(results, losses)])
    if dist.get_rank() == 0:
        print(f"{args.task}, AdamW, rate {rate:g}, SIDCo({args.ratio:g}), {args.seeds} seeds\n")
        print(markdown.table(["workers", "steps", "row", *CELLS], table, 3))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
