"""How dense the reduced gradient is with more and more workers (gradient build-up), for every compressor.

    python studies/build_up.py [--rows TopK MiCRO] [--ratio 0.01] [--workers 2 4 8 16] [--steps 300]

Trains the model of the digits example. All workers run in this process. The density is the number of entries in the reduced
gradient, which is the union of all workers' entries, divided by the size of the bucket. Prints a table of the last third of
the steps.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import around  # noqa: F401  (the examples and the benchmarks can be imported after it)
import markdown
import torch
from tqdm import tqdm
from workers import Make, Training

from horovod_sparse.compressors import COMPRESSORS, MiCRO, NoOp, SIDCo, Threshold, TopK
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.numpy import Balanced, Union


def _default(cls: Callable[..., Compressor], **chosen: Any) -> Make:
    return lambda ratio, threshold: cls(ratio, granularity="model", warmup=None, **chosen)


ROWS: dict[str, Make] = {
    **{cls.__name__: _default(cls) for cls in COMPRESSORS if cls not in (NoOp, Threshold)},
    "Threshold": lambda ratio, threshold: Threshold(threshold, ratio=ratio, granularity="model"),
    "MiCRO, paper": _default(MiCRO, scaling="paper"),
    "TopK, union": _default(TopK, exchange=Union()),
    "SIDCo, balanced": _default(SIDCo, exchange=Balanced()),
    "dense": lambda ratio, threshold: NoOp(granularity="model"),
}
"""All compressors; MiCRO's variants; and two exchanges that others can choose. Dense has a loss, and no build-up."""
HEADER = ("compressor", "workers", "density / ratio: median", "mean (5 %–95 %)", "independent choices", "training loss")


def measure(row: str, workers: int, args: argparse.Namespace) -> list[str]:
    """The cells of one compressor on one number of workers."""
    training = Training(ROWS[row], "digits", args.ratio, workers, args.seed)
    numel, last = training.buckets[0].numel, args.steps // 3
    k = training.compressor.target_count(numel)
    counts, truncated = [], []
    for _ in range(args.steps):
        counts.append(training.step(training.gradients()) / k)
        truncated.append(sum(bucket.tally.last.truncated for bucket in training.buckets) / k)
    low, *_, high = statistics.quantiles(counts[-last:], n=20)
    # If each worker chose its entries independently of the others, all with the same probability.
    independent = (1.0 - (1.0 - k / numel) ** workers) * numel / k
    return [
        row,
        str(workers),
        f"{statistics.median(counts[-last:]):.2f}",
        f"{statistics.fmean(counts[-last:]):.2f} ({low:.2f}–{high:.2f})",
        f"{independent:.2f}",
        f"{statistics.fmean(training.losses[-last * workers :]):.4f}",
        f"{statistics.fmean(truncated[-last:]):.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help="compressors")
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=300, help="at least 60")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps < 60:
        parser.error(f"--steps must be at least 60, got {args.steps}")
    torch.set_num_threads(1)
    # MiCRO's messages have no room for all entries while its residuals grow; the table says how many.
    warnings.filterwarnings("ignore", message=".*than its message has room for", category=UserWarning)
    runs = list(itertools.product(args.rows, args.workers))
    rows = [measure(row, workers, args) for row, workers in tqdm(runs, file=sys.stderr)]
    print(f"digits, ratio {args.ratio:g}, {args.steps} steps, seed {args.seed}; the last {args.steps // 3} steps:\n")
    print(markdown.table([*HEADER, "truncated / k"], rows))


if __name__ == "__main__":
    main()
