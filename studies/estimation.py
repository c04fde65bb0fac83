"""How close every compressor comes to the count it was asked for, and how far its error is from exact top-k's.

    python studies/estimation.py [--output FOLDER] [--page FILE] [--picture FILE]

Feeds the same gradients to all compressors: those of three examples' own models in training, and synthetic ones of known
distributions, each at three ratios, raw and with error feedback. Several workers take their steps together in this process,
and collectives are carried out in memory. Prints tables, writes them with a picture to a page, and everything as JSON; fails
when a compressor that is held to it is more than 10 % off the asked count on average with error feedback.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import around
import estimation_report as report
import machine
import numpy as np
import torch
from estimation_data import KINDS, RECORDED, stream
from estimation_report import CLOSED, RAW, Result
from torch import Tensor
from tqdm import tqdm

from horovod_sparse.compressors import COMPRESSORS, DGC, GaussianK, MiCRO, NoOp, RedSync, SIDCo, Threshold, TopK
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.layout import Parameter, Slot, layouts_of
from horovod_sparse.core.pipeline import Pipeline, Write
from horovod_sparse.exchange.protocols import Collective, Reduced
from horovod_sparse.torch.compiled import tensor_ops

OPS = tensor_ops()


@dataclass(frozen=True)
class Row:
    """One compressor of the tables."""

    name: str
    make: Callable[..., Compressor]
    """make(ratio, residual=...)."""
    held: bool = False
    """Whether its mean count has to be within the tolerance."""
    together: bool = False
    """Whether one worker's choice depends on the others'."""
    wants_threshold: bool = False
    """make also takes the threshold that exactly k entries of the first gradient exceed."""


def _with(cls: Callable[..., Compressor], **chosen: Any) -> Callable[..., Compressor]:
    return lambda ratio, **settings: cls(ratio, **chosen, **settings)


ROWS = (
    Row("TopK", TopK),
    Row("SIDCo exponential", _with(SIDCo, distribution="exponential"), held=True),
    Row("SIDCo gamma", _with(SIDCo, distribution="gamma"), held=True),
    Row("SIDCo gpareto", _with(SIDCo, distribution="gpareto"), held=True),
    Row("SIDCo exponential, paper", _with(SIDCo, distribution="exponential", adapt="paper")),
    Row("SIDCo gamma, paper", _with(SIDCo, distribution="gamma", adapt="paper")),
    Row("SIDCo gpareto, paper", _with(SIDCo, distribution="gpareto", adapt="paper")),
    Row("GaussianK exact", _with(GaussianK, refine="exact"), held=True),
    Row("GaussianK paper", _with(GaussianK, refine="paper")),
    # Without momentum, so that it selects from the same as the others.
    Row("DGC, momentum 0", _with(DGC, momentum=0.0), held=True),
    Row("RedSync trim", _with(RedSync, method="trim")),
    Row("RedSync bisect", _with(RedSync, method="bisect")),
    Row("MiCRO two-sided", _with(MiCRO, scaling="two_sided"), held=True, together=True),
    Row("MiCRO paper", _with(MiCRO, scaling="paper"), together=True),
    # The classes without variants. NoOp sends everything.
    *(
        Row(cls.__name__, cls)
        for cls in COMPRESSORS
        if cls not in (TopK, SIDCo, GaussianK, DGC, RedSync, MiCRO, Threshold, NoOp)
    ),
    Row(
        "Threshold", lambda ratio, *, threshold, **more: Threshold(threshold, ratio=ratio, **more), wants_threshold=True
    ),
)


def collective(requests: Sequence[Collective]) -> list[Tensor]:
    """What each worker gets of one collective."""
    messages, workers = [request.message for request in requests], len(requests)
    if requests[0].kind == "alltoall":
        return [torch.cat(parts) for parts in zip(*(message.chunk(workers) for message in messages), strict=True)]
    result = torch.cat(messages) if requests[0].kind == "allgather" else torch.stack(messages).sum(0)
    return [result.clone() for _ in requests]


def exchange(pipelines: Sequence[Pipeline]) -> list[Tensor]:
    """All workers' exchange of their one bucket; the entries that each has parted with."""
    indices: list[list[Tensor]] = [[] for _ in pipelines]

    def writer(worker: int) -> Write:
        def write(slots: Sequence[Slot], reduced: Reduced) -> None:
            parts = reduced.parts()
            # As many parts as workers: each sent its own entries. One part: all sent the same ones.
            part = parts[worker] if len(parts) == len(pipelines) else parts[0]
            assert part.indices is not None
            indices[worker].append(part.indices)

        return write

    following: list[Collective | None] = [pipeline.buckets[0].begin() for pipeline in pipelines]
    while following[0] is not None:
        results = collective([one for one in following if one is not None])
        following = [
            pipeline.advance(pipeline.buckets[0], result, 1.0, writer(worker))
            for worker, (pipeline, result) in enumerate(zip(pipelines, results, strict=True))
        ]
    for pipeline in pipelines:
        pipeline.end_step()
    return [own[0] for own in indices]


class Trial:
    """One compressor at one ratio on one kind of data: its workers, and what was measured of them."""

    def __init__(self, row: Row, ratio: float, mode: str, first: Tensor, workers: int, start: int) -> None:
        self.row, self.ratio, self.mode, self.start = row, ratio, mode, start
        self.numel = len(first)
        settings: dict[str, Any] = {"residual": mode == CLOSED, "min_numel": 0, "warmup": None}
        k = max(1, math.floor(ratio * len(first)))
        if row.wants_threshold:
            settings["threshold"] = OPS.kth_largest(first, min(k + 1, len(first)))
        compressor = row.make(ratio, **settings)
        self.k, self.room = compressor.target_count(len(first)), compressor.slack
        layouts = layouts_of([Parameter("p", tuple(first.shape), "float32", "cpu")], compressor)
        self.pipelines = [Pipeline(OPS, compressor, world=workers, position=p, rank=p) for p in range(workers)]
        for pipeline in self.pipelines:
            pipeline.add_buckets(layouts, lambda name: first)
        self.quotients: list[float] = []
        self.errors: list[float] = []

    def step(self, gradients: Sequence[Tensor], *, counted: bool, compared: bool) -> None:
        """All workers' next step; `compared`: look at the error as well."""
        for pipeline, gradient in zip(self.pipelines, gradients, strict=False):
            pipeline.arrive("p", gradient)
        before = [OPS.copy(pipeline.buckets[0].buffer) for pipeline in self.pipelines] if compared else []
        sent = exchange(self.pipelines)
        if counted:
            self.quotients.append(statistics.fmean(len(indices) for indices in sent) / self.k)
        for u, indices in zip(before, sent, strict=False):
            largest = OPS.select_largest(u, self.k).indices
            least = OPS.norm(u.index_fill(0, largest, 0.0))
            if least > 0.0:  # otherwise all that is not zero fits into k entries, and there is nothing to compare with
                self.errors.append(OPS.norm(u.index_fill(0, indices, 0.0)) / least)


def result(kind: str, trials: Sequence[Trial]) -> Result:
    """What was measured with several seeds, together."""
    one = trials[0]
    quotients = [quotient for trial in trials for quotient in trial.quotients]
    errors = [error for trial in trials for error in trial.errors]
    low, high = np.percentile(quotients, (5, 95))
    return Result(
        compressor=one.row.name, data=kind, ratio=one.ratio, mode=one.mode, held=one.row.held, room=one.room,
        numel=one.numel, k=one.k, mean=statistics.fmean(quotients), p5=float(low), p95=float(high),
        error=statistics.fmean(errors) if errors else None,
        seeds=[statistics.fmean(trial.quotients) for trial in trials],
    )  # fmt: skip


def measure(kind: str, seed: int, args: argparse.Namespace) -> list[Trial]:
    """All compressors, ratios and modes on one kind of data."""
    gradients = stream(kind, workers=args.workers, size=args.size, seed=seed, skipped=args.record_burn_in)
    late = max(args.burn_in - args.raw_burn_in, 0)
    trials: list[Trial] = []
    for step in tqdm(range(args.steps), desc=f"{kind}, seed {seed}", file=sys.stderr, leave=False):
        now = next(gradients)
        if step == 0:
            for mode in (CLOSED, RAW):
                for ratio in args.ratios:
                    for row in ROWS:
                        workers = args.workers if row.together else min(args.replicas, args.workers)
                        start = late if mode == RAW and not row.together else 0
                        trials.append(Trial(row, ratio, mode, now[0], workers, start))
        counted = step >= args.burn_in
        compared = counted and (step - args.burn_in) % args.error_every == 0
        for trial in trials:
            if step >= trial.start:
                trial.step(now, counted=counted, compared=compared)
    for trial in trials:
        trial.pipelines.clear()  # the residuals are large, and done with
    return trials


def measure_all(args: argparse.Namespace) -> list[Result]:
    """On every kind of data. Steps of a training run depend on each other, so there are several; synthetic ones do not."""
    runs = [(kind, args.seed + i) for kind in args.data for i in range(args.seeds if kind in RECORDED else 1)]
    trials: dict[str, list[list[Trial]]] = {}
    for kind, seed in tqdm(runs, desc="data", file=sys.stderr):
        trials.setdefault(kind, []).append(measure(kind, seed, args))
    return [result(kind, same) for kind, seeds in trials.items() for same in zip(*seeds, strict=True)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="kinds of data")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.01, 0.001])
    parser.add_argument("--size", type=int, default=100_000, help="entries of a synthetic gradient")
    parser.add_argument("--workers", type=int, default=4, help="workers of compressors whose workers choose together")
    parser.add_argument("--replicas", type=int, default=2, help="workers of the others, which repeat the same")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--burn-in", type=int, default=200, help="first steps that are not counted")
    parser.add_argument(
        "--raw-burn-in",
        type=int,
        default=40,
        help="of these, steps that are run without feedback, where nothing settles",
    )
    parser.add_argument("--record-burn-in", type=int, default=60, help="training steps before the first recorded one")
    parser.add_argument(
        "--error-every", type=int, default=10, help="counted steps from one look at the error to the next"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seeds", type=int, default=3, help="training runs of each example, with one seed after the other"
    )
    parser.add_argument("--output", type=Path, default=Path("estimation-output"), help="folder for estimation.json")
    parser.add_argument("--page", type=Path, default=around.DOCS / "estimation.md", help="the page to write")
    parser.add_argument("--picture", type=Path, default=around.DOCS / "estimation.png", help="the picture to draw")
    args = parser.parse_args()
    if not 0 <= args.burn_in < args.steps:
        parser.error(f"--burn-in must be in [0, --steps), got {args.burn_in} of {args.steps} steps")
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    started = time.process_time()
    results = measure_all(args)
    conditions = {
        "command": shlex.join(["python", "studies/estimation.py", *sys.argv[1:]]),
        "processor": machine.describe(),
        "torch": torch.__version__,
        "processor_seconds": time.process_time() - started,
    }
    settings = {name: getattr(args, name) for name in ("size", "workers", "replicas", "steps", "burn_in", "raw_burn_in",
                                                       "record_burn_in", "error_every", "seed", "seeds")}  # fmt: skip
    everything = {**conditions, **settings, "results": [asdict(result) for result in results]}
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "estimation.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    report.draw(results, args.picture)
    link = os.path.relpath(args.picture, args.page.parent)
    args.page.write_text(report.page(results, conditions, settings, link), encoding="utf-8")
    print(report.tables(results))
    outside = report.outside(results)
    print(f"\n{report.verdict(results)}")
    if outside:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
