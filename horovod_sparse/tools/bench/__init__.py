"""How long a compressor's step takes on this machine, in units of the least that error feedback costs.

The unit is `residual.add_(gradient)`. It reads the gradient, and reads and writes the residual: 12 bytes per element. Imports
no framework until something is measured.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from horovod_sparse import kernels
from horovod_sparse.tools.bench.rows import ROWS, Conditions


def add_arguments(
    parser: argparse.ArgumentParser, *, sizes: tuple[int, ...], repetitions: int, everything: bool
) -> None:
    """Add the options, with these defaults. Time all rows by default with `everything`, else the chosen ones."""
    add = parser.add_argument
    add("--sizes", nargs="+", type=_count, default=list(sizes), metavar="N", help="elements, as 1000000 or 25M")
    add("--ratios", nargs="+", type=float, default=[0.001], metavar="RATIO", help="of the entries that are sent")
    add("--threads", nargs="+", type=int, default=[1], metavar="N", help="of PyTorch and the kernels")
    add("--repetitions", type=int, default=repetitions, metavar="N")
    add("--backend", choices=["torch", "numpy", "tensorflow"], default="torch")
    choices = ["auto", "off", *kernels.NAMES]
    add(
        "--kernels",
        nargs="+",
        choices=choices,
        default=["auto"],
        metavar="VARIANT",
        help=f"any of {', '.join(choices)}",
    )
    add("--rows", nargs="+", metavar="TEXT", help="only rows whose names contain one of these")
    add("--memory", action="store_true", help="measure each row's memory too, in a process of its own")
    add("--verbs", action="store_true", help="say where the time goes; in the whole step, also what is not timed")
    add("--bars", action="store_true", help="exit with status 1 if a row takes longer than it may")
    add("--markdown", action="store_true", help="print Markdown")
    add("--json", type=Path, metavar="FILE")
    add("--picture", type=Path, metavar="FILE")
    parser.set_defaults(everything=everything, run=run)


def _count(text: str) -> int:
    """Parse a number of elements."""
    for suffix, factor in (("M", 1_000_000), ("k", 1_000)):
        if text.endswith(suffix):
            return int(float(text.removesuffix(suffix)) * factor)
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the results, and return the exit status."""
    try:
        from horovod_sparse.tools.bench import measure, report
    except ImportError as error:
        raise SystemExit(
            f"the benchmark needs PyTorch and Horovod for it ({error}); see horovod-sparse check"
        ) from error
    if arguments.backend == "tensorflow" and len(arguments.threads) > 1:
        raise SystemExit("--threads must be one number with --backend tensorflow, which cannot change it in a process")
    rows = [row for row in ROWS if row.chosen or arguments.everything]
    if arguments.rows:
        rows = [row for row in ROWS if any(text.lower() in row.title.lower() for text in arguments.rows)]
    results = []
    here = kernels.variants()
    for variant, threads, size, ratio in product(
        arguments.kernels, arguments.threads, arguments.sizes, arguments.ratios
    ):
        if variant not in ("off", *(("auto", *here) if here else ())):
            raise SystemExit(
                f"--kernels must be off or one of {', '.join(here) or '(none is compiled)'}, got {variant}"
            )
        conditions = Conditions(size, ratio, threads, arguments.backend, here[0] if variant == "auto" else variant)
        results += measure.measure(
            conditions, rows, arguments.repetitions, memory=arguments.memory, verbs=arguments.verbs
        )
    print(report.markdown(results) if arguments.markdown else report.text(results))
    if arguments.json:
        report.write_json(results, arguments.json)
    if arguments.picture:
        report.draw(results, arguments.picture)
    if not arguments.bars:
        return 0
    held = [result for result in results if result.within is not None]
    if not held:
        raise SystemExit("--bars needs rows that have one: of 1M, 25M or 100M elements, with kernels and one thread")
    exceeded = [result for result in held if not result.within]
    for result in exceeded:
        print(
            f"{report.title(result.conditions)}: {result.title} takes {result.units:.2f} units, more than {result.bar:g}"
        )
    print(f"{len(held) - len(exceeded)} of {len(held)} rows are within their bars.")
    return 1 if exceeded else 0
