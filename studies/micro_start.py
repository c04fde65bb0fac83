"""How MiCRO's count begins: the published scaling of the threshold beside ours, from the first step on.

    python studies/micro_start.py [--workers 4] [--steps 1200] [--ratios 0.01 0.001] [--seeds 2]

Trains three examples' models with `workers.Training`: all workers are in this process. The published scaling has room for
everything that exceeds the threshold, so the count is what it selects. It begins with the threshold of the released code,
1/(2 sqrt k), or with one that k entries of the first gradients exceed, as our class begins. Prints a table of count / k at
some steps, and from which step on it stays near k.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import around  # noqa: F401  (the examples and the benchmarks can be imported after it)
import machine
import markdown
import torch
from estimation_data import RECORDED
from tqdm import tqdm
from workers import Training

from horovod_sparse.compressors import MiCRO
from horovod_sparse.compressors.micro import MiCROState
from horovod_sparse.estimation.controllers import Scaling

SHOWN = (1, 10, 30, 100, 300, 600)
"""Steps of the table, beside the last ones."""
WINDOW = 20
"""Steps whose mean count is looked at."""
NEAR = 0.25
"""A mean count is near k if it is off by no more than this part of k."""


class Start(NamedTuple):
    """A variant of MiCRO."""

    name: str
    scaling: Scaling
    published: bool
    """Whether the first threshold is that of the released code."""


STARTS = (
    Start("published scaling and first threshold", "paper", published=True),
    Start("published scaling, our first threshold", "paper", published=False),
    Start("our scaling and first threshold, room for 2 k", "two_sided", published=False),
)
Counts = dict[tuple[str, float, Start], list[list[float]]]
"""(task, ratio, variant) -> count / k in every step, of each seed."""


def counts(task: str, ratio: float, start: Start, seed: int, args: argparse.Namespace) -> list[float]:
    """Train one model; count / k in every step."""
    # The published scaling has room for everything.
    room = {"slack": args.workers / ratio} if start.scaling == "paper" else {}

    def make(ratio: float, threshold: float) -> MiCRO:
        return MiCRO(ratio, scaling=start.scaling, **room, granularity="model", warmup=None)

    training = Training(make, task, ratio, args.workers, seed)
    k = training.compressor.target_count(training.buckets[0].numel)
    if start.published:
        for bucket in training.buckets:
            assert isinstance(bucket.state, MiCROState)
            # About the threshold of k entries, for gradients of norm 1.
            bucket.state.current = 0.5 / math.sqrt(k)
    return [training.step(training.gradients()) / k for _ in range(args.steps)]


def settled(quotients: Sequence[float]) -> int | None:
    """The step from which on every mean of `WINDOW` steps is near k; None if there is none."""
    means = [statistics.fmean(quotients[end - WINDOW : end]) for end in range(WINDOW, len(quotients) + 1)]
    far = [number for number, mean in enumerate(means) if abs(mean - 1.0) > NEAR]
    first = far[-1] + 1 if far else 0
    return first + 1 if first < len(means) else None


def table(found: Counts) -> str:
    """One line for each task, ratio and variant; where there are several seeds, the least and the most of them."""
    steps = len(next(iter(found.values()))[0])
    shown = [step for step in SHOWN if step <= steps]
    head = ["model", "ratio", "variant", "largest", *(f"step {step}" for step in shown)]
    head += [f"mean of the last {WINDOW}", f"within {NEAR:.0%} of k from step"]
    rows = []
    for (task, ratio, start), seeds in found.items():
        cells = [_range([max(one) for one in seeds])]
        cells += [_range([one[step - 1] for one in seeds]) for step in shown]
        cells.append(_range([statistics.fmean(one[-WINDOW:]) for one in seeds]))
        ends = [settled(one) for one in seeds]
        cells.append(", ".join("never" if end is None else str(end) for end in ends))
        rows.append([task, f"{ratio:g}", start.name, *cells])
    return markdown.table(head, rows, words=3)


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least}–{most}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(RECORDED), default=list(RECORDED), metavar="TASK")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.01, 0.001])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1200, help=f"at least {WINDOW}")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    if args.steps < WINDOW:
        parser.error(f"--steps must be at least {WINDOW}, got {args.steps}")
    torch.set_num_threads(1)
    # In our own variant, what has no room while residuals grow.
    warnings.filterwarnings("ignore", message=".*than its message has room for", category=UserWarning)
    found: Counts = {}
    runs = [(task, ratio, start) for task in args.tasks for ratio in args.ratios for start in STARTS]
    for task, ratio, start in tqdm(runs, file=sys.stderr):
        found[task, ratio, start] = [counts(task, ratio, start, seed, args) for seed in range(args.seeds)]
    print(f"{args.workers} workers, {args.steps} steps, {args.seeds} seeds; {machine.describe()}\n\n{table(found)}")


if __name__ == "__main__":
    main()
