"""What one worker computes and sends in a step with more and more workers, and how long a network would take for it.

    python studies/build_up_time.py [--workers 2 4 8 16] [--numel 4000000] [--ratio 0.01] [--rounds 25] [--picture FILE]

All workers run in this process, with gradients of their own, and collectives are carried out in memory. Only the first
worker's computation is timed, as processor time: adding the gradient to the residual, selecting, packing, and adding up
what all workers have sent. The compressors take turns. The network is not measured: its time is that of the model of
`horovod-sparse plan` for the messages that were sent. Prints a table and draws it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import around
import machine
import markdown
import torch
from build_up import ROWS
from estimation import OPS, collective
from torch import Tensor
from tqdm import tqdm

from horovod_sparse.core.layout import Parameter, Slot, layouts_of
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.exchange.protocols import Collective, Reduced
from horovod_sparse.tools.plan import DENSE16, DENSE32, LATENCY, Network, Round, Rounds
from horovod_sparse.tools.quantities import parse_bandwidth

PICTURE = around.DOCS / "build-up-time.png"
CONTENDERS = ("TopK", "SIDCo", "MiCRO", "SIDCo, balanced")
NETWORKS = ("10gbit", "1gbit")
DENSE = ("dense fp32", "dense fp16")
COLORS = ("#000000", "#3b7dd8", "#c2410c", "#009e73", "#7a7a7a", "#b08d57")
BASES = 5
"""Gradients that are drawn. Every worker gets one of them, rotated, in every step."""


class Result(NamedTuple):
    """One compressor on one number of workers; seconds of processor time."""

    row: str
    workers: int
    quartiles: tuple[float, float, float]
    unit: float
    """Of `residual.add_(gradient)`, in the same rounds."""
    rounds: Rounds
    """The collectives of a step."""

    def sent(self) -> float:
        """Bytes that one worker sends in a step."""
        return sum(call.bytes_sent(self.workers) for together in self.rounds for call in together)

    def over(self, where: Network) -> float:
        return where.seconds(self.rounds, self.workers)


class Group:
    """All workers of one compressor."""

    def __init__(self, row: str, ratio: float, first: Tensor, workers: int) -> None:
        k = max(1, math.floor(ratio * len(first)))
        compressor = ROWS[row](ratio, OPS.kth_largest(first, k + 1))
        layouts = layouts_of([Parameter("p", tuple(first.shape), "float32", "cpu")], compressor)
        self.pipelines = [Pipeline(OPS, compressor, world=workers, position=p, rank=p) for p in range(workers)]
        for pipeline in self.pipelines:
            pipeline.add_buckets(layouts, lambda name: first)
        self.reduced = torch.empty_like(first)
        self.seconds: list[float] = []
        self.rounds: list[list[Round]] = []

    def step(self, gradients: Sequence[Tensor], *, timed: bool) -> None:
        """All workers' next step."""
        self.spent, self.rounds = 0.0, []
        following = [self._begin(number, gradient) for number, gradient in enumerate(gradients)]
        while following[0] is not None:
            requests = [one for one in following if one is not None]
            message = requests[0].message
            self.rounds.append([Round(requests[0].kind, message.numel(), str(message.dtype).removeprefix("torch."))])
            results = collective(requests)
            following = [self._advance(number, result) for number, result in enumerate(results)]
        for pipeline in self.pipelines:
            pipeline.end_step()
        if timed:
            self.seconds.append(self.spent)

    def _begin(self, number: int, gradient: Tensor) -> Collective | None:
        pipeline = self.pipelines[number]
        started = time.process_time()
        pipeline.arrive("p", gradient)
        sent = pipeline.buckets[0].begin()
        self._count(number, started)
        return sent

    def _advance(self, number: int, result: Tensor) -> Collective | None:
        pipeline = self.pipelines[number]
        started = time.process_time()
        following = pipeline.advance(pipeline.buckets[0], result, float(len(self.pipelines)), self._write)
        self._count(number, started)
        return following

    def _count(self, number: int, started: float) -> None:
        if number == 0:
            self.spent += time.process_time() - started

    def _write(self, slots: Sequence[Slot], reduced: Reduced) -> None:
        for slot in slots:
            reduced.write([(slot.offset, self.reduced[slot.offset : slot.offset + slot.numel])])


def gradients(bases: Sequence[Tensor], workers: int) -> Iterator[list[Tensor]]:
    """One gradient for each worker, step by step. A rotation keeps the distribution and moves what is large."""
    generator = torch.Generator().manual_seed(1)
    while True:
        chosen = torch.randint(len(bases), (workers,), generator=generator).tolist()
        shifts = torch.randint(len(bases[0]), (workers,), generator=generator).tolist()
        yield [bases[base].roll(shift) for base, shift in zip(chosen, shifts, strict=True)]


def measure(args: argparse.Namespace) -> list[Result]:
    """All compressors on each number of workers."""
    rng = torch.Generator().manual_seed(0)
    uniform = torch.rand((BASES, args.numel), generator=rng) - 0.5
    # Double exponential, from its inverse distribution function.
    bases = list(-uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.4999999)))
    results = []
    for workers in tqdm(args.workers, file=sys.stderr):
        groups = {row: Group(row, args.ratio, bases[0], workers) for row in args.rows}
        residual, units = torch.zeros(args.numel), []
        for step, now in zip(range(args.burn_in + args.rounds), gradients(bases, workers), strict=False):
            for group in groups.values():
                group.step(now, timed=step >= args.burn_in)
            started = time.process_time()
            residual.add_(now[0])
            units.append(time.process_time() - started)
        for row, group in groups.items():
            low, middle, high = statistics.quantiles(group.seconds, n=4)
            unit = statistics.median(units[args.burn_in :])
            results.append(Result(row, workers, (low, middle, high), unit, group.rounds))
    return results


def dense(args: argparse.Namespace) -> list[Result]:
    """Dense exchanges, of which only the network's time is known."""
    return [
        Result(name, workers, (0.0, 0.0, 0.0), 0.0, method.rounds(args.numel, 1.0, workers))
        for name, method in zip(DENSE, (DENSE32, DENSE16), strict=True)
        for workers in args.workers
    ]


def table(results: Sequence[Result]) -> str:
    """One line per compressor and number of workers."""
    head = ["exchange", "workers", "computes, ms: median (quartiles)", "in units", "bytes sent"]
    for name in NETWORKS:
        head += [f"network, {name}, ms", f"both, {name}, ms"]
    rows = []
    for one in results:
        low, middle, high = (1e3 * seconds for seconds in one.quartiles)
        computes = (
            [f"{middle:.2f} ({low:.2f}–{high:.2f})", f"{one.quartiles[1] / one.unit:.2f}"] if one.unit else ["", ""]
        )
        cells = [one.row, str(one.workers), *computes, f"{one.sent():,.0f}"]
        for name in NETWORKS:
            over = one.over(Network(LATENCY, parse_bandwidth("network", name)))
            cells += [f"{1e3 * over:.1f}", f"{1e3 * (over + one.quartiles[1]):.1f}"]
        rows.append(cells)
    return markdown.table(head, rows)


def draw(results: Sequence[Result], picture: Path) -> None:
    """What a worker computes, and with each network, computation and communication together."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 1 + len(NETWORKS))
    for name, color in zip(dict.fromkeys(one.row for one in results), COLORS, strict=False):
        chosen = [one for one in results if one.row == name]
        worlds = [one.workers for one in chosen]
        style = {"color": color, "marker": "o", "linewidth": 1.5, "label": name}
        if name not in DENSE:
            axes[0].plot(worlds, [1e3 * one.quartiles[1] for one in chosen], **style)
        for panel, where in zip(axes[1:], NETWORKS, strict=True):
            over = Network(LATENCY, parse_bandwidth("network", where))
            panel.plot(worlds, [1e3 * (one.over(over) + one.quartiles[1]) for one in chosen], **style)
            panel.set_title(f"and network ({where}, predicted)", fontsize=10)
            panel.set_yscale("log")
    axes[0].set_title("one worker's computation", fontsize=10)
    axes[0].set_ylabel("ms per step")
    axes[0].set_ylim(bottom=0)
    for panel in axes:
        panel.set_xscale("log", base=2)
        panel.set_xticks(worlds, [str(number) for number in worlds])
        panel.set_xlabel("workers")
        panel.grid(color="#e5e5e5", linewidth=0.6)
    axes[-1].legend(fontsize=8, frameon=False)
    figure.savefig(picture, dpi=85)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(CONTENDERS), metavar="ROW")
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--numel", type=int, default=4_000_000, help="entries of the bucket")
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=25, help="steps that are timed")
    parser.add_argument("--burn-in", type=int, default=30, help="steps before them")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="the picture to draw")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # MiCRO's, while residuals grow.
    warnings.filterwarnings("ignore", message=".*than its message has room for", category=UserWarning)
    results = [*measure(args), *dense(args)]
    unit = statistics.median(1e3 * one.unit for one in results if one.unit)
    print(f"{args.numel:,} entries, ratio {args.ratio:g}, one thread; a unit is {unit:.2f} ms\n{machine.describe()}\n")
    print(table(results))
    draw(results, args.picture)


if __name__ == "__main__":
    main()
