"""How long the warm-up by age must be for the plain line, and what `ahead` adds: many workers in one process.

    python studies/warmup.py charlm --workers 2 8 --steps 600
    python studies/warmup.py lstm --workers 2 --steps 400 --rates 0.5 2.0 --rows "c = 8" "c = 8, ahead"

Trains a model of the examples by SGD with momentum 0.9 in the optimizer, on gradients that `VirtualWorkers` have reduced with
SIDCo: what each worker selects and sends is what a job of so many processes would send. Each worker draws samples of its own
part of the data. The learning rate rises over a tenth of the steps and then falls. With "ahead" each worker's gradient is that
at `x - 0.5 eta e` (`compression.ahead`). Each run is a line of the log, and is not repeated while its line is there. Prints
the held-out loss beside dense training with the same rate and seed, in percent.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import around
import markdown
import text
import torch
import torch.nn.functional as F
import torch_charlm
import torch_lstm
from torch import Tensor, nn

import horovod_sparse.numpy as sparse
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.exchange.cost import allreduce_bytes

DENSE = "dense"
ROWS: dict[str, tuple[float | None, float]] = {
    DENSE: (None, 0.0),
    "c = 2": (2.0, 0.0),
    "c = 4": (4.0, 0.0),
    "c = 8": (8.0, 0.0),
    "c = 16": (16.0, 0.0),
    "c = 4, ahead": (4.0, 0.5),
    "c = 8, ahead": (8.0, 0.5),
    "c = 16, ahead": (16.0, 0.5),
}
"""c of the warm-up, and the coefficient of `ahead`."""


@dataclass(frozen=True)
class Task:
    """A model, and how much of the text a worker sees in a step."""

    make: Callable[[], nn.Module]
    batch: int
    context: int
    rates: tuple[float, ...]


TASKS = {
    "charlm": Task(lambda: torch_charlm.CharLM(32, 128, 3, 4), 4, 32, (0.1, 0.2)),
    "lstm": Task(lambda: torch_lstm.CharLSTM(256, 1), 4, 32, (0.5, 2.0)),
}
"""Smaller than the examples' own: 600 thousand and 480 thousand parameters."""


@contextmanager
def moved(model: nn.Module, workers: sparse.VirtualWorkers, worker: int, by: float) -> Iterator[None]:
    """A block in which the parameters are moved by a part of what waits for one worker."""
    if not by or not workers.pipelines:
        yield
        return
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    residuals = workers.pipelines[worker].residuals.views
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


def train(task: Task, row: str, ratio: float, rate: float, number: int, steps: int, seed: int) -> dict[str, float]:
    """The held-out loss after the training, and the bytes of a worker as a part of dense training's."""
    torch.manual_seed(seed)
    c, ahead = ROWS[row]
    compression: Compressor = sparse.NoOp() if c is None else sparse.SIDCo(ratio, warmup=c)
    model, workers = task.make(), sparse.VirtualWorkers(number, compression)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    corpus = text.read_corpus(400_000)
    boundary = int(0.95 * len(corpus))
    shards = corpus[:boundary].tensor_split(number)
    generators = [torch.Generator().manual_seed(1000 * seed + worker) for worker in range(number)]
    names, sent = dict(model.named_parameters()), 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / (0.1 * steps), max(1.0 - step / steps, 0.02))
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        for worker in range(number):
            x, y = text.sample(shards[worker], task.batch, task.context, generators[worker])
            model.zero_grad()
            with moved(model, workers, worker, ahead * optimizer.param_groups[0]["lr"]):
                F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            for name, parameter in names.items():
                assert parameter.grad is not None
                found[name].append(parameter.grad)
        reduced = workers({name: torch.stack(each).numpy() for name, each in found.items()})
        for name, parameter in names.items():
            parameter.grad = torch.from_numpy(reduced[name])
        optimizer.step()
        sent += workers.stats().last.total.bytes_sent + workers.stats().last.dense_bytes_sent
    dense = allreduce_bytes(4 * sum(parameter.numel() for parameter in names.values()), number)
    return {
        "loss": text.bits_per_character(model, corpus[boundary:], task.context),
        "bytes": sent / steps / dense,
    }


class Log:
    """The results of all runs, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._known: dict[str, dict[str, float]] = dict(json.loads(line) for line in lines)

    def run(self, title: str, make: Callable[[], dict[str, float]]) -> dict[str, float]:
        if title not in self._known:
            self._known[title] = make()
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([title, self._known[title]]) + "\n")
        return self._known[title]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS], metavar="ROW", help="beside dense")
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates; those of the task by default")
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--log", type=Path, default=around.ROOT / "build" / "warmup.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.log.parent.mkdir(parents=True, exist_ok=True)
    task, log = TASKS[args.task], Log(args.log)
    header = ["workers", "rate", "row", "loss", "beside dense, %", "each seed, %", "bytes, dense's = 1"]
    rows: list[list[str]] = []
    for number in args.workers:
        for rate in args.rates or task.rates:
            losses: dict[str, list[float]] = {}
            for row in dict.fromkeys([DENSE, *args.rows]):
                results = []
                for seed in range(args.seeds):
                    title = f"{args.task} {row} {args.ratio:g} {rate:g} {number} {args.steps} {seed}"
                    given = (task, row, args.ratio, rate, number, args.steps, seed)
                    results.append(log.run(title, partial(train, *given)))
                losses[row] = [one["loss"] for one in results]
                beside = [100.0 * (mine / dense - 1.0) for mine, dense in zip(losses[row], losses[DENSE], strict=True)]
                each = ", ".join(f"{one:+.1f}" for one in beside)
                mean = [statistics.fmean(one) for one in (losses[row], beside, [one["bytes"] for one in results])]
                rows.append(
                    [str(number), f"{rate:g}", row, f"{mean[0]:.3f}", f"{mean[1]:+.1f}", each, f"{mean[2]:.3f}"]
                )
    print(f"{args.task}, SIDCo({args.ratio:g}), {args.steps} steps, {args.seeds} seeds\n")
    print(markdown.table(header, rows, 3))


if __name__ == "__main__":
    main()
