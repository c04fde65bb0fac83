"""How long a compressor's step takes on this machine, in units of the least that error feedback costs.

The unit is `residual.add_(gradient)`. It reads the gradient, and reads and writes the residual: 12 bytes per element. Imports
no framework until something is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import product

from horovod_sparse import kernels
from horovod_sparse.tools.bench import measure
from horovod_sparse.tools.bench.rows import ROWS, Conditions
from horovod_sparse.tools.options import quantity
from horovod_sparse.tools.quantities import parse_count

BACKENDS = ("torch", "numpy")


def add_arguments(parser: argparse.ArgumentParser, sizes: Sequence[int], repetitions: int) -> None:
    """Add the options, with these defaults."""
    add = parser.add_argument
    add(
        "--sizes",
        nargs="+",
        type=quantity(parse_count, "sizes"),
        default=list(sizes),
        metavar="N",
        help="elements, as 1000000 or 25M",
    )
    add("--ratios", nargs="+", type=float, default=[0.001], metavar="RATIO", help="of the entries that are sent")
    add("--threads", nargs="+", type=int, default=[1], metavar="N", help="of PyTorch and the kernels")
    add("--repetitions", type=int, default=repetitions, metavar="N")
    add("--rows", nargs="+", default=[""], metavar="TEXT", help="only rows whose titles contain one of these")


def conditions(arguments: argparse.Namespace) -> Iterator[Conditions]:
    """Return all conditions that were asked for, with the kernels that are set."""
    for threads, size, ratio in product(arguments.threads, arguments.sizes, arguments.ratios):
        yield Conditions(size, ratio, threads, arguments.backend, kernels.variant())


def asked(title: str, arguments: argparse.Namespace) -> bool:
    """Return whether the row with this title is to be timed."""
    return any(text.lower() in title.lower() for text in arguments.rows)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the results, and return the exit status."""
    rows = [row for row in ROWS if asked(row.title, arguments)]
    results: list[measure.Result] = []
    try:
        for group in conditions(arguments):
            results += measure.measure(group, rows, arguments.repetitions)
    except ImportError as error:
        raise SystemExit(
            f"the back end needs PyTorch and Horovod for it ({error}); see horovod-sparse check"
        ) from error
    print(measure.text(results))
    return 0
