"""How close every compressor comes to the count it was asked for, and how far its error is from exact top-k's.

    python studies/estimation.py [--data digits Laplace] [--seeds 1]

Feeds the same gradients to all compressors: those of three examples' own models in training, and synthetic ones of known
distributions, each at three ratios, raw and with error feedback. Prints tables; fails when a compressor that is held to it is
more than 10 % off the asked count on average with error feedback.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import around  # noqa: F401  (the examples and the benchmarks can be imported after it)
import machine
import markdown
import numpy as np
import torch
from estimation_data import KINDS, MOSTLY_ZERO, RECORDED, Array, stream
from tqdm import tqdm

from horovod_sparse.compressors import COMPRESSORS, DGC, GaussianK, MiCRO, NoOp, RedSync, SIDCo, Threshold, TopK
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.numpy import VirtualWorkers
from horovod_sparse.numpy.ops import NumpyOps

OPS = NumpyOps()
WORKERS, REPLICAS = 4, 2
"""Workers of compressors whose workers choose together, and of the others, which repeat the same."""
RAW_BURN_IN = 40
"""Of the steps that are not counted, those that are run without feedback, where nothing settles."""
RECORD_BURN_IN = 60
"""Training steps before the first recorded one."""
ERROR_EVERY = 10
"""Counted steps from one look at the error to the next."""
CLOSED, RAW = "feedback", "raw"
TOLERANCE = 0.1


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


ROWS = (
    Row("TopK", TopK),
    Row("SIDCo exponential", partial(SIDCo, distribution="exponential"), held=True),
    Row("SIDCo gamma", partial(SIDCo, distribution="gamma"), held=True),
    Row("SIDCo gpareto", partial(SIDCo, distribution="gpareto"), held=True),
    Row("SIDCo exponential, paper", partial(SIDCo, distribution="exponential", adapt="paper")),
    Row("SIDCo gamma, paper", partial(SIDCo, distribution="gamma", adapt="paper")),
    Row("SIDCo gpareto, paper", partial(SIDCo, distribution="gpareto", adapt="paper")),
    Row("GaussianK exact", partial(GaussianK, refine="exact"), held=True),
    Row("GaussianK paper", partial(GaussianK, refine="paper")),
    Row("DGC", DGC, held=True),
    Row("RedSync", RedSync),
    Row("MiCRO two-sided", partial(MiCRO, scaling="two_sided"), held=True, together=True),
    Row("MiCRO paper", partial(MiCRO, scaling="paper"), together=True),
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


@dataclass
class Result:
    """One compressor at one ratio on one kind of data: what was measured with all seeds."""

    row: Row
    ratio: float
    mode: str
    data: str
    quotients: list[float] = field(default_factory=list)
    """Achieved / asked count of every counted step."""
    errors: list[float] = field(default_factory=list)
    """Beside top-k's; none where top-k leaves nothing behind."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.quotients)

    def count_cell(self) -> str:
        low, high = np.percentile(self.quotients, (5, 95))
        return f"{self.mean:.3f} ({low:.2f}–{high:.2f})"

    def error_cell(self) -> str:
        return f"{statistics.fmean(self.errors):.3f}" if self.errors else "–"


class Trial:
    """The workers that measure one result with one seed."""

    def __init__(self, result: Result, first: Array, late: int) -> None:
        self.result, row = result, result.row
        self.start = late if result.mode == RAW and not row.together else 0
        settings: dict[str, Any] = {"residual": result.mode == CLOSED, "min_numel": 0, "warmup": None}
        if row.wants_threshold:
            k = max(1, int(result.ratio * len(first)))
            settings["threshold"] = OPS.kth_largest(first, min(k + 1, len(first)))
        compressor = row.make(result.ratio, **settings)
        self.k = compressor.target_count(len(first))
        # Workers that choose independently of the others work alone.
        numbers = [WORKERS] if row.together else [1] * REPLICAS
        self.groups = [VirtualWorkers(number, compressor) for number in numbers]
        for group in self.groups:
            # The first call makes the buckets, which `step` looks at before its own.
            group({"p": np.zeros((group.number, len(first)), np.float32)})
            group.reset()

    def step(self, gradients: Array, *, counted: bool, compared: bool) -> None:
        """All workers' next step; `compared`: look at the error as well."""
        counts = []
        for group in self.groups:
            mine, gradients = gradients[: group.number], gradients[group.number :]
            us = [feedback.buckets[0].buffer + g for feedback, g in zip(group.feedbacks, mine, strict=True)]
            sent = np.flatnonzero(group({"p": mine})["p"])
            counts += [feedback.buckets[0].last.sent for feedback in group.feedbacks]
            for u in us if compared else ():
                self._compare(u, sent)
        if counted:
            self.result.quotients.append(statistics.fmean(counts) / self.k)

    def _compare(self, u: Array, sent: Array) -> None:
        """Set what a selection leaves behind beside what top-k does."""
        least, left = (_norm_without(u, indices) for indices in (OPS.select_largest(u, self.k).indices, sent))
        if least > 0.0:  # otherwise all that is not zero fits into k entries, and there is nothing to compare with
            self.result.errors.append(left / least)


def _norm_without(u: Array, indices: Array) -> float:
    left = u.copy()
    left[indices] = 0.0
    return OPS.norm(left)


def measure(results: Sequence[Result], seed: int, args: argparse.Namespace) -> None:
    """All compressors, ratios and modes on one kind of data."""
    gradients = stream(results[0].data, workers=WORKERS, size=args.size, seed=seed, skipped=RECORD_BURN_IN)
    now = next(gradients)
    trials = [Trial(result, now[0], max(args.burn_in - RAW_BURN_IN, 0)) for result in results]
    for step in tqdm(range(args.steps), desc=f"{results[0].data}, seed {seed}", file=sys.stderr, leave=False):
        counted = step >= args.burn_in
        compared = counted and (step - args.burn_in) % ERROR_EVERY == 0
        for trial in trials:
            if step >= trial.start:
                trial.step(now, counted=counted, compared=compared)
        now = next(gradients)


def table(results: Sequence[Result], cell: Callable[[Result, Result], str]) -> str:
    """One line per compressor and ratio, one column per kind of data; `cell` gets the results with feedback and raw."""
    found = {(one.row.name, one.ratio, one.data, one.mode): one for one in results}
    names, ratios, kinds, _ = (list(dict.fromkeys(column)) for column in zip(*found, strict=True))
    rows = [
        [name, str(ratio), *(cell(found[name, ratio, kind, CLOSED], found[name, ratio, kind, RAW]) for kind in kinds)]
        for name in names
        for ratio in ratios
    ]
    return markdown.table(["compressor", "ratio", *kinds], rows)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--data", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="kinds of data")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.01, 0.001])
    parser.add_argument("--size", type=int, default=100_000, help="entries of a synthetic gradient")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--burn-in", type=int, default=200, help="first steps that are not counted")
    parser.add_argument("--seeds", type=int, default=3, help="training runs of each example")
    args = parser.parse_args()
    if not 0 <= args.burn_in < args.steps:
        parser.error(f"--burn-in must be in [0, --steps), got {args.burn_in} of {args.steps} steps")
    torch.set_num_threads(1)
    results = []
    for kind in args.data:
        same = [Result(row, ratio, mode, kind) for mode in (CLOSED, RAW) for ratio in args.ratios for row in ROWS]
        # Steps of a training run depend on each other, so there are several; synthetic ones do not.
        for seed in range(args.seeds if kind in RECORDED else 1):
            measure(same, seed, args)
        results += same
    print(f"{machine.describe()}; torch {torch.__version__}\n")
    count = "achieved/asked count, mean (5 %–95 %)"
    print(f"With error feedback: {count}\n\n{table(results, lambda fed, raw: fed.count_cell())}\n")
    print(f"Raw gradients: {count}\n\n{table(results, lambda fed, raw: raw.count_cell())}\n")
    error = table(results, lambda fed, raw: f"{fed.error_cell()} / {raw.error_cell()}")
    print(f"Error relative to exact top-k's: with feedback / raw\n\n{error}\n")
    held = [one for one in results if one.row.held and one.mode == CLOSED and one.data != MOSTLY_ZERO]
    failed = [
        f"{one.row.name} at {one.ratio} on {one.data}: {one.mean:.3f}"
        for one in held
        if abs(one.mean - 1.0) > TOLERANCE
    ]
    if failed:
        raise SystemExit(f"mean counts with feedback must be within {TOLERANCE:.0%} of k, got\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
