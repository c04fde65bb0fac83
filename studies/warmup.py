"""How long the warm-up by age must be for the plain line, and what `ahead` adds: many workers in one process.

    python studies/warmup.py charlm --workers 2 8 --steps 600 2400 --ratios 0.01 0.001
    python studies/warmup.py lstm --rates 0.5 2.0 --rows "c = 8" "c = 8, ahead"
    python studies/warmup.py gpt2 --optimizer adamw --rows "c = 8"
    python studies/warmup.py charlm --workers 2 8 --rows "c = 16" "packed, c = 32" "packed, c = 32, ahead"

Trains a small model by SGD with momentum 0.9, or by AdamW, on gradients that `VirtualWorkers` have reduced with SIDCo: what
each worker selects and sends is what a job of so many processes would send. Each worker draws samples of its own part of the
data. The learning rate rises over a tenth of the steps and then falls. With "ahead" each worker's gradient is that at
`x - 0.5 eta e` (`compression.ahead`). Each run is a line of the log, and is not repeated while its line is there. Prints the
held-out loss beside dense training with the same rate and seed, in percent, and how many dense exchanges have as many bytes as
a worker has sent. Task "gpt2" needs Transformers.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import around
import markdown
import torch
from tasks import ADAMW, CELLS, DENSE, SGD, TASKS, Log, cells, rate_at
from torch import Tensor, nn

import horovod_sparse.numpy as sparse
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.plan import rounds_of
from horovod_sparse.exchange.cost import allreduce_bytes
from horovod_sparse.exchange.pairs import Values
from horovod_sparse.tools.plan import warm_up


class Row(NamedTuple):
    """How gradients are exchanged."""

    c: float | None = None
    """Of the warm-up; None: dense."""
    ahead: float = 0.0
    """The coefficient of `ahead`."""
    values: Values = "float32"
    """Of the pairs."""

    def compression(self, ratio: float) -> Compressor:
        return sparse.SIDCo(ratio, warmup=self.c, exchange=sparse.Pairs(self.values))


ROWS: dict[str, Row] = {
    DENSE: Row(),
    **{f"c = {c}": Row(float(c)) for c in (2, 4, 8, 16, 32)},
    **{f"c = {c}, ahead": Row(float(c), 0.5) for c in (4, 8, 16)},
    **{f"packed, c = {c}": Row(float(c), values="packed") for c in (16, 32)},
    **{f"packed, c = {c}, ahead": Row(float(c), 0.5, "packed") for c in (16, 32)},
}


@contextmanager
def moved(model: nn.Module, workers: sparse.VirtualWorkers, worker: int, by: float) -> Iterator[None]:
    """A block in which the parameters are moved by a part of what waits for one worker."""
    if not by or not workers.feedbacks:
        yield
        return
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    residuals = workers.feedbacks[worker].residuals.views
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in residuals:
                parameter.sub_(torch.from_numpy(residuals[name]), alpha=by)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])


@dataclass(frozen=True)
class Setting:
    """What a run depends on."""

    task: str
    optimizer: str
    rate: float
    row: str
    ratio: float
    workers: int
    steps: int
    seed: int

    @property
    def title(self) -> str:
        """Its key in the log. Dense training has no ratio."""
        ratio = "" if self.row == DENSE else f" {self.ratio:g}"
        return f"{self.task} {self.optimizer} {self.rate:g} {self.row}{ratio} {self.workers} {self.steps} {self.seed}"


def train(of: Setting) -> dict[str, float]:
    """The held-out loss after the training, and the bytes of a worker in dense exchanges."""
    torch.manual_seed(of.seed)
    task, row = TASKS[of.task], ROWS[of.row]
    compression = sparse.NoOp() if of.row == DENSE else row.compression(of.ratio)
    model, workers = task.make(), sparse.VirtualWorkers(of.workers, compression)
    if of.optimizer == SGD:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), of.rate, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), of.rate, weight_decay=0.1)
    parts, held_out = task.data.split(of.workers)
    generators = [torch.Generator().manual_seed(1000 * of.seed + worker) for worker in range(of.workers)]
    names, sent = dict(model.named_parameters()), 0.0
    for step in range(of.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, of.steps, of.rate)
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        for worker, (part, generator) in enumerate(zip(parts, generators, strict=True)):
            x, y = task.data.draw(part, generator)
            model.zero_grad()
            with moved(model, workers, worker, row.ahead * optimizer.param_groups[0]["lr"]):
                task.data.loss(model(x), y).backward()
            for name, parameter in names.items():
                assert parameter.grad is not None
                found[name].append(parameter.grad)
        reduced = workers({name: torch.stack(each).numpy() for name, each in found.items()})
        for name, parameter in names.items():
            parameter.grad = torch.from_numpy(reduced[name])
        optimizer.step()
        sent += workers.stats().last.total.bytes_sent + workers.stats().last.dense_bytes_sent
    dense = allreduce_bytes(4 * sum(parameter.numel() for parameter in names.values()), of.workers)
    return {"loss": task.data.evaluate(model, held_out), "exchanges": sent / dense}


def price(compression: Compressor, workers: int) -> tuple[int, float]:
    """How many steps the warm-up lasts, and how many dense exchanges it costs over what the final ratio sends in them."""
    numel = 2**24
    dense = allreduce_bytes(4 * numel, workers)
    steps, _, sent = warm_up(compression, numel, workers)
    at_last = sum(one.bytes_sent(workers) for one in rounds_of(compression, numel, None, workers))
    return steps, (sent - steps * at_last) / dense


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--optimizer", choices=[SGD, ADAMW], default=SGD)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS], metavar="ROW", help="beside dense")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.01])
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates; those of the task by default")
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int, nargs="+", default=[600])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--log", type=Path, default=around.ROOT / "build" / "warmup.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    log, rates = Log(args.log), args.rates or TASKS[args.task].rates[args.optimizer]
    header = ["workers", "steps", "rate", "ratio", "row", *CELLS]
    table: list[list[str]] = []
    for workers, steps, rate in itertools.product(args.workers, args.steps, rates):
        dense: list[float] = []
        for ratio, row in [(1.0, DENSE), *itertools.product(args.ratios, args.rows)]:
            of = Setting(args.task, args.optimizer, rate, row, ratio, workers, steps, 0)
            each = [replace(of, seed=seed) for seed in range(args.seeds)]
            results = [log.run(one.title, partial(train, one)) for one in each]
            dense = dense or [result["loss"] for result in results]
            shown = ["" if row == DENSE else f"{ratio:g}", row, *cells(results, dense)]
            table.append([str(workers), str(steps), f"{rate:g}", *shown])
    print(f"{args.task}, {args.optimizer}, {args.seeds} seeds\n")
    print(markdown.table(header, table, 5))
    for ratio, workers in itertools.product(args.ratios, args.workers):
        made = {repr(one): one for one in (ROWS[row].compression(ratio) for row in args.rows)}
        for title, compression in made.items():
            steps, more = price(compression, workers)
            print(f"{title}, {workers} workers: {more:.0f} dense exchanges more, in {steps} steps")


if __name__ == "__main__":
    main()
