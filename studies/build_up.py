"""How dense the reduced gradient is with more and more workers (gradient build-up), for every compressor.

    python studies/build_up.py [--task digits] [--ratio 0.01] [--workers 2 4 8 16] [--steps 300] [--picture FILE]

Trains the model of an example. All workers run in this process: each has its own data, its own residual and its own pipeline.
They share one model, which the reduced gradient updates. Collectives are carried out in memory. The density is the number of
entries in the reduced gradient, which is the union of all workers' entries, divided by the size of the bucket. Prints its
median over the last third of the steps as a table, draws it, and prints the training loss and how MiCRO's count develops.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import around
import markdown
import torch
from estimation import OPS, collective
from estimation_data import MOMENTUM, RECORDED
from torch import Tensor
from tqdm import tqdm

from horovod_sparse.compressors import COMPRESSORS, MiCRO, NoOp, SIDCo, Threshold, TopK
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.layout import Parameter, Slot, layouts_of
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.exchange import wire
from horovod_sparse.exchange.balanced import Balanced
from horovod_sparse.exchange.protocols import Collective, Reduced
from horovod_sparse.exchange.union import Union

PICTURE = around.DOCS / "build-up.png"
Make = Callable[[float, float], Compressor]
"""(ratio, the threshold that ratio * numel entries of the first gradient exceed) -> compressor."""


def _default(cls: Callable[..., Compressor], **chosen: Any) -> Make:
    return lambda ratio, threshold: cls(ratio, granularity="model", warmup=None, **chosen)


MICRO_ROW = "MiCRO"
ROWS: dict[str, Make] = {
    **{cls.__name__: _default(cls) for cls in COMPRESSORS if cls not in (MiCRO, NoOp, Threshold)},
    MICRO_ROW: _default(MiCRO),
    "Threshold": lambda ratio, threshold: Threshold(threshold, ratio=ratio, granularity="model"),
    "MiCRO, paper": _default(MiCRO, scaling="paper"),
    "TopK, union": _default(TopK, exchange=Union()),
    "SIDCo, balanced": _default(SIDCo, exchange=Balanced()),
    "dense": lambda ratio, threshold: NoOp(granularity="model"),
}
"""All compressors; MiCRO's variants; and two exchanges that others can choose. Dense has a loss, and no build-up."""
PICTURED = ("Threshold", "TopK", "TopK, union", "MiCRO, paper", MICRO_ROW, "RandomBlock")
"""The other rows lie on one of these, within a few percent: those of pairs on TopK's, the others on RandomBlock's."""
MICRO = (MICRO_ROW, "MiCRO, paper")
INDEPENDENT = "independent choices"


@dataclass(frozen=True)
class Step:
    """What one step of all workers sent of the bucket."""

    count: int
    """Entries of the reduced gradient: of the union of all workers' entries."""
    selected: list[int]
    """Entries in each worker's message of indices, with MiCRO; else empty."""
    truncated: float
    """Entries that qualified but had no room in their worker's message, of all workers."""


class Training:
    """One model that is trained by some workers with one compressor. All are in this process."""

    def __init__(self, make: Make, task: str, ratio: float, workers: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.task = RECORDED[task](workers, seed)
        self.losses: list[float] = []
        """Every worker's, step by step, after that of the first gradient."""
        self.parameters = {f"p{number}": one for number, one in enumerate(self.task.model.parameters())}
        first = torch.cat([g.abs().flatten() for g in self._gradients(self.task.losses[0])])
        self.compressor = make(ratio, OPS.kth_largest(first, int(ratio * len(first))))
        described = [Parameter(name, tuple(p.shape), "float32", "cpu") for name, p in self.parameters.items()]
        self.sparse = [one for one in described if not self.compressor.leaves_dense(one.name, one.numel)]
        self.pipelines = [Pipeline(OPS, self.compressor, world=workers, position=p, rank=p) for p in range(workers)]
        for pipeline in self.pipelines:
            pipeline.add_buckets(layouts_of(self.sparse, self.compressor), lambda name: first)
        corrected = self.compressor.momentum_correction is not None
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=0.0, momentum=0.0 if corrected else MOMENTUM)
        self.steps = 0

    def _gradients(self, loss: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        value = loss()
        self.losses.append(value.item())
        return torch.autograd.grad(value, list(self.parameters.values()))

    def step(self) -> Step:
        """One step of all workers."""
        self.accumulate()
        return self.finish()

    def accumulate(self) -> None:
        """Add all workers' gradients of the next step to their residuals."""
        self.steps += 1
        names = {one.name for one in self.sparse}
        dense: dict[str, list[Tensor]] = {}
        for pipeline, loss in zip(self.pipelines, self.task.losses, strict=True):
            for name, gradient in zip(self.parameters, self._gradients(loss), strict=True):
                if name in names:
                    pipeline.arrive(name, gradient)
                else:
                    dense.setdefault(name, []).append(gradient)
        for name, gradients in dense.items():
            self.parameters[name].grad = torch.stack(gradients).mean(0)

    def finish(self) -> Step:
        """Exchange what has been accumulated, and update the model."""
        done = self._exchange()
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.rate(self.steps)
        self.optimizer.step()
        return done

    def _exchange(self) -> Step:
        """Exchange the bucket, write the reduced gradient to the model, and return what was sent."""
        entries: list[Tensor] = []
        buckets = [pipeline.buckets[0] for pipeline in self.pipelines]
        following: list[Collective | None] = [bucket.begin() for bucket in buckets]
        selected = [] if not isinstance(self.compressor, MiCRO) else [_used(one) for one in following if one]
        while following[0] is not None:
            results = collective([one for one in following if one is not None])
            # All workers get the same, so one of them writes.
            writes: Iterable[Any] = itertools.chain([partial(self._write, entries)], itertools.repeat(_nothing))
            following = [
                pipeline.advance(bucket, result, float(len(buckets)), write)
                for pipeline, bucket, result, write in zip(self.pipelines, buckets, results, writes, strict=False)
            ]
        for pipeline in self.pipelines:
            pipeline.end_step()
        truncated = sum(bucket.tally.last.truncated for bucket in buckets)
        # NoOp sends everything, without indices.
        count = len(torch.unique(torch.cat(entries))) if entries else buckets[0].numel
        return Step(count, selected, truncated)

    def _write(self, entries: list[Tensor], slots: Sequence[Slot], reduced: Reduced) -> None:
        entries += [part.indices for part in reduced.parts() if part.indices is not None]
        for slot in slots:
            gradient = torch.empty(slot.numel)
            reduced.write([(slot.offset, gradient)])
            self.parameters[slot.name].grad = gradient.view(slot.shape)


def _used(sent: Collective) -> int:
    return int((sent.message[wire.HEADER :] >= 0).sum())


def _nothing(slots: Sequence[Slot], reduced: Reduced) -> None:
    return


@dataclass(frozen=True)
class Result:
    """One compressor on one number of workers."""

    row: str
    workers: int
    numel: int
    k: int
    steps: list[Step]
    losses: list[float]
    """Every worker's, step by step."""

    @property
    def loss(self) -> float:
        """The training loss: mean of the last third of the steps."""
        return statistics.fmean(self.losses[-(len(self.steps) // 3) * self.workers :])

    @property
    def growth(self) -> float:
        """The density as a multiple of k / size of the bucket: median of the last third of the steps."""
        late = self.steps[-(len(self.steps) // 3) :]
        return statistics.median(step.count for step in late) / self.k


def measure(args: argparse.Namespace) -> list[Result]:
    results = []
    for row, workers in tqdm(list(itertools.product(args.rows, args.workers)), file=sys.stderr):
        training = Training(ROWS[row], args.task, args.ratio, workers, args.seed)
        numel = training.pipelines[0].buckets[0].numel
        steps = [training.step() for _ in range(args.steps)]
        k = training.compressor.target_count(numel)
        results.append(Result(row, workers, numel, k, steps, training.losses))
    return results


def by_row(results: Sequence[Result], figure: Callable[[Result], float]) -> dict[str, list[float]]:
    """A figure of each row, for every number of workers."""
    return {
        row: [figure(one) for one in results if one.row == row] for row in dict.fromkeys(one.row for one in results)
    }


def growths(results: Sequence[Result]) -> dict[str, list[float]]:
    """The growth of each row that is not dense; last, what independent choices would give."""
    sparse = [one for one in results if one.k < one.numel]
    lines = by_row(sparse, lambda one: one.growth)
    if sparse:
        ratio, worlds = sparse[0].k / sparse[0].numel, sorted({one.workers for one in sparse})
        lines[INDEPENDENT] = [independent(ratio, n) for n in worlds]
    return lines


def table(lines: Mapping[str, Sequence[float]], worlds: Sequence[int], digits: int = 2) -> str:
    """One line per row, one column per number of workers."""
    rows = [[row, *(f"{x:.{digits}f}" for x in figures)] for row, figures in lines.items()]
    return markdown.table(["compressor", *(f"{n} workers" for n in worlds)], rows)


def independent(ratio: float, workers: int) -> float:
    """The growth if each worker chose its entries independently of the others, all with the same probability."""
    return float(-math.expm1(workers * math.log1p(-ratio)) / ratio)


def micro_table(results: Sequence[Result]) -> str:
    """MiCRO's count in each third of the training, how unequal workers and parts are, and what has no room."""
    header = ["compressor", "workers", "steps", "count / k: mean (5 %–95 %)", "largest worker's count in a step / mean"]
    header += ["largest part's count in all steps / mean", "truncated / k"]
    rows = []
    for one in results:
        third = len(one.steps) // 3
        for start in (0, third, 2 * third):
            steps = one.steps[start : start + third]
            counts = [step.count / one.k for step in steps]
            low, *_, high = statistics.quantiles(counts, n=20)
            worker = statistics.fmean(largest(step.selected) for step in steps)
            # In step t, part q belongs to worker q - t.
            parts = [
                sum(step.selected[(part - number) % one.workers] for number, step in enumerate(steps, start))
                for part in range(one.workers)
            ]
            truncated = statistics.fmean(step.truncated for step in steps) / one.k
            count = f"{statistics.fmean(counts):.2f} ({low:.2f}–{high:.2f})"
            cells = [one.row, str(one.workers), f"{start + 1}–{start + third}", count]
            rows.append([*cells, f"{worker:.2f}", f"{largest(parts):.2f}", f"{truncated:.2f}"])
    return markdown.table(header, rows)


def largest(counts: Sequence[int]) -> float:
    """The largest count, as a multiple of the mean."""
    return max(counts) * len(counts) / sum(counts)


def draw(
    lines: Mapping[str, Sequence[float]], worlds: Sequence[int], counts: Mapping[int, Sequence[float]], picture: Path
) -> None:
    """Left: growth against the number of workers. Right: MiCRO's count / k in every step, by number of workers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, row in enumerate(row for row in lines if row in PICTURED):
        left.plot(worlds, lines[row], marker="ov^sDP"[number], markersize=5, label=row)
    if INDEPENDENT in lines:
        left.plot(worlds, lines[INDEPENDENT], "k--", linewidth=0.8, label=INDEPENDENT)
    left.set(xscale="log", yscale="log", xlabel="workers", ylabel="density of the reduced gradient / ratio")
    left.set_xticks(worlds, [str(n) for n in worlds], minor=False)
    left.set_xticks([], minor=True)
    ticks = [1, 2, 5, 10, 20, 50]
    left.set_yticks(ticks, [str(tick) for tick in ticks], minor=False)
    left.set_yticks([], minor=True)
    for workers, count in counts.items():
        right.plot(range(1, len(count) + 1), count, linewidth=0.8, label=f"{workers} workers")
    right.set(xlabel="step", ylabel="count / k", title=MICRO_ROW)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        # Beside the data, never over them.
        if axes.lines:
            axes.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4)
    figure.savefig(picture, dpi=110)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--task", choices=list(RECORDED), default="digits", help="the example whose model is trained")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help="compressors")
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=300, help="a multiple of 3, at least 60")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, default=PICTURE, help="the picture to draw")
    args = parser.parse_args()
    if args.steps < 60 or args.steps % 3:
        parser.error(f"--steps must be a multiple of 3 and at least 60, got {args.steps}")
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    # MiCRO's messages have no room for all entries while its residuals grow; the table says how many.
    warnings.filterwarnings(
        "ignore", message=".*entries of bucket .* than its message has room for", category=UserWarning
    )
    args.workers.sort()
    results = measure(args)
    one, last = min(results, key=lambda one: one.k), args.steps // 3
    print(f"{args.task}: bucket of {one.numel:,} entries, k = {one.k:,}, {args.steps} steps, seed {args.seed}\n")
    lines, worlds = growths(results), args.workers
    print(f"Density of the reduced gradient / ratio, median of the last {last} steps:\n\n{table(lines, worlds)}\n")
    losses = table(by_row(results, lambda one: one.loss), worlds, digits=4)
    print(f"Training loss, mean of the last {last} steps:\n\n{losses}\n")
    micro = [one for one in results if one.row in MICRO]
    if micro:
        print(micro_table(micro))
    counts = {one.workers: [step.count / one.k for step in one.steps] for one in results if one.row == MICRO_ROW}
    draw(lines, worlds, counts, args.picture)


if __name__ == "__main__":
    main()
