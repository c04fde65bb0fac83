"""How near gradients in training are to the distributions that SIDCo and Gaussian-k fit to them.

    python studies/distributions.py [--steps 1200] [--points 12] [--seeds 2]

Trains three examples' models (CNN, LSTM, transformer) on two workers in this process: dense, and by TopK with error feedback
at each ratio. At some steps it takes the first worker's accumulated gradient (residual plus gradient; without feedback the
gradient alone) and fits every distribution to its magnitudes with the library's own fits, in one stage and in several. It
also compares what top-k leaves behind with the tighter bound on it. Prints a table of all models and steps together.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import around  # noqa: F401  (the examples and the benchmarks can be imported after it)
import machine
import markdown
import numpy as np
import torch
from estimation_data import RECORDED, Array, Training
from numpy.typing import NDArray
from tqdm import tqdm

from horovod_sparse.compressors import NoOp, TopK, gaussiank
from horovod_sparse.compressors.sidco import FIRST_RATIO
from horovod_sparse.estimation import fits
from horovod_sparse.numpy import VirtualWorkers
from horovod_sparse.numpy.ops import NumpyOps
from horovod_sparse.ops.protocol import Sums

WORKERS = 2
OPS = NumpyOps()
RAW = "gradient alone"
FIRST_STEP = 10
"""The first step that is looked at."""
CLOSE = 1.25
"""A count is called close to k if it is within this factor of it."""
Gradient = NDArray[np.float32]
SURVIVAL = np.concatenate([np.linspace(0.998, 0.002, 499), np.geomspace(0.002, 1e-6, 60)[1:]])
"""Probabilities of larger magnitudes at which a fit is compared with the data."""
Quantile = Callable[[Sums, float], float]
"""(moments of magnitudes, probability of larger ones) -> magnitude."""


def _exponential(moments: Sums, p: float) -> float:
    return fits.exponential(moments.mean, p)


def _gamma(moments: Sums, p: float, *, closed_form: bool = False) -> float:
    return fits.gamma(moments.mean, moments.mean_log, p, closed_form=closed_form)


def _gpareto(moments: Sums, p: float) -> float:
    return fits.generalized_pareto(moments.mean, moments.variance, p)


FAMILIES: dict[str, tuple[Quantile, Quantile | None]] = {
    "Gaussian": (lambda moments, p: gaussiank.fit(moments, p * moments.count, moments.count), None),
    "exponential": (_exponential, _exponential),
    "gamma": (_gamma, _gpareto),
    "gamma, closed form": (partial(_gamma, closed_form=True), _gpareto),
    "gpareto": (_gpareto, _gpareto),
}
"""What is fitted to all magnitudes, and what to the excesses over an earlier threshold."""


class Fitted(NamedTuple):
    """The last stage of an estimate: the excesses over `start` have these moments, and this is fitted to them."""

    start: float
    moments: Sums
    quantile: Quantile

    def threshold(self, p: float) -> float:
        """The magnitude that a part p of the entries above `start` exceeds, according to the fit."""
        return self.start + self.quantile(self.moments, p)


@dataclass(frozen=True)
class Snapshot:
    """One gradient, and what was found of it."""

    kind: str
    """`RAW`, or the ratio of the feedback."""
    kurtosis: float
    """Excess kurtosis of the entries that are not zero: 0 for a Gaussian, 3 for a double exponential."""
    distances: dict[tuple[str, int], float]
    """Kolmogorov and Smirnov's, by family and stages, of the magnitudes that the last stage is fitted to."""
    counts: dict[tuple[str, int], list[float]]
    """Achieved / asked, by family and stages, at each ratio."""
    holds: bool
    """Whether `||u - TopK(u)||^2 <= (1 - k/d)^2 ||u||^2` for all k in [1, d)."""


def fit(x: Gradient, family: str, k: float, stages: int) -> Fitted:
    """Fit a family as SIDCo does: first to all magnitudes that are not zero, then to excesses, with k entries as the aim."""
    first, following = FAMILIES[family]
    fitted = Fitted(0.0, OPS.measure(x, 0.0, with_log=True), first)
    for remaining in range(stages - 1, 0, -1):
        assert following is not None
        count = fitted.moments.count
        p = FIRST_RATIO if fitted.start == 0.0 else (k / count) ** (1.0 / (remaining + 1))
        start = fitted.threshold(p)
        tail = OPS.measure(x, start)
        if tail.count <= k or start <= 0.0:
            # Nothing is left to fit to, or the first stage has found no threshold.
            break
        fitted = Fitted(start, tail, following)
    return fitted


def distance(fitted: Fitted, ascending: Gradient) -> float:
    """The largest difference between the fitted and the observed part of larger magnitudes, among those above `start`."""
    thresholds = np.array([fitted.threshold(float(p)) for p in SURVIVAL])
    larger = len(ascending) - np.searchsorted(ascending, thresholds.astype(np.float32), side="right")
    return float(np.abs(larger / fitted.moments.count - SURVIVAL).max())


def snapshot(x: Gradient, kind: str, ratios: Sequence[float]) -> Snapshot:
    """All fits to one gradient."""
    not_zero = x[x != 0].astype(np.float64)
    centred = not_zero - not_zero.mean()
    ascending = np.sort(np.abs(x))
    distances, counts = {}, {}
    for family, (first, tail) in FAMILIES.items():
        # The closed form is no distribution. Where the second stage starts does not depend on the ratio.
        for stages in () if "closed form" in family else (1, 2) if tail is first else (1,):
            distances[family, stages] = distance(fit(x, family, ratios[0] * len(x), stages), ascending)
        for stages in (1, 3) if tail else (1,):
            found = []
            for ratio in ratios:
                k = max(1, int(ratio * len(x)))
                fitted = fit(x, family, k, stages)
                found.append(float((ascending > fitted.threshold(k / fitted.moments.count)).sum()) / k)
            counts[family, stages] = found
    squares = np.square(ascending.astype(np.float64))
    # What is left of the squared norm when 1, 2, ... of the largest entries are taken.
    left = np.cumsum(squares)[-2::-1] / squares.sum()
    holds = bool((left <= (1.0 - np.arange(1, len(x)) / len(x)) ** 2).all())
    kurtosis = float((centred**4).mean() / (centred**2).mean() ** 2 - 3.0)
    return Snapshot(kind, kurtosis, distances, counts, holds)


def train(task: str, kind: str, seed: int, args: argparse.Namespace) -> Iterator[Snapshot]:
    """Train one model, and look at its gradients at some steps."""
    points = {round(step) for step in np.geomspace(FIRST_STEP, args.steps, args.points)}
    ratios = args.ratios if kind == RAW else [float(kind)]
    compressor = NoOp(granularity="model") if kind == RAW else TopK(ratios[0], granularity="model", warmup=None)
    training, workers = Training(task, WORKERS, seed), VirtualWorkers(WORKERS, compressor)
    for step in range(1, args.steps + 1):
        gradients = {f"p{number}": one.numpy() for number, one in enumerate(training.gradients())}
        if step in points:
            yield snapshot(accumulated(workers, gradients), kind, ratios)
        reduced = workers(gradients)
        training.step(torch.from_numpy(reduced[name]) for name in gradients)


def accumulated(workers: VirtualWorkers, gradients: dict[str, Array]) -> Gradient:
    """The first worker's residual and gradient together."""
    bucket = workers.feedbacks[0].buckets[0]
    x: Gradient = bucket.buffer.copy()
    for name, slot in bucket.slots.items():
        x[slot.offset : slot.offset + slot.numel] += gradients[name][0].ravel()
    return x


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median, least and largest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def close(counts: Sequence[float]) -> str:
    """How many counts are within `CLOSE` of k, and of how many."""
    return f"{sum(1 / CLOSE <= count <= CLOSE for count in counts)} of {len(counts)}"


def table(snapshots: Sequence[Snapshot]) -> str:
    """Kurtosis, distances and counts, of the gradients alone and of those with feedback."""
    groups = [[one for one in snapshots if (one.kind == RAW) == raw] for raw in (True, False)]
    rows = [["excess kurtosis", *(spread([one.kurtosis for one in group], 1) for group in groups)]]
    for name, stages in sorted(snapshots[0].distances, key=lambda key: key[1]):
        what = "all magnitudes" if stages == 1 else "the excesses"
        cells = [spread([one.distances[name, stages] for one in group]) for group in groups]
        rows.append([f"distance of {what} from {name}", *cells])
    for name, stages in snapshots[0].counts:
        cells = [close([count for one in group for count in one.counts[name, stages]]) for group in groups]
        rows.append([f"count within a factor {CLOSE:g} of k: {name}, stages: {stages}", *cells])
    return markdown.table(["", RAW, "with feedback"], rows)


def nearest(one: Snapshot) -> str:
    """The family with the smallest distance of all magnitudes."""
    names = [name for name, stages in one.distances if stages == 1]
    return min(names, key=lambda name: one.distances[name, 1])


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(RECORDED), default=list(RECORDED), metavar="TASK")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.01, 0.001], help="of TopK with feedback")
    parser.add_argument("--steps", type=int, default=1200, help="of every training run")
    parser.add_argument("--points", type=int, default=12, help="steps to look at, evenly on a logarithmic scale")
    parser.add_argument("--seeds", type=int, default=2, help="training runs of each kind")
    args = parser.parse_args()
    if args.steps < FIRST_STEP:
        parser.error(f"--steps must be at least {FIRST_STEP}, got {args.steps}")
    torch.set_num_threads(1)
    kinds = [RAW, *(f"{ratio:g}" for ratio in args.ratios)]
    runs = list(itertools.product(args.tasks, kinds, range(args.seeds)))
    snapshots = [one for task, kind, seed in tqdm(runs, file=sys.stderr) for one in train(task, kind, seed, args)]
    print(f"{machine.describe()}, one thread; torch {torch.__version__}\n\n{table(snapshots)}\n")
    total, wins = len(snapshots), Counter(map(nearest, snapshots))
    print(f"Nearest to all magnitudes of {total} gradients: {', '.join(f'{n} {wins[n]}' for n in sorted(wins))}.")
    print(f"(1 - k/d)^2 bounds what top-k leaves of {sum(one.holds for one in snapshots)} of them, for every k.")


if __name__ == "__main__":
    main()
