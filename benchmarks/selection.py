"""How long every compressor's step takes, in units of what error feedback costs at least: `residual.add_(gradient)`.

    python benchmarks/selection.py [--sizes 25M] [--memory] [--bars] [--markdown] [--json FILE] [--picture FILE]

Times one worker's whole step but for the collectives, on three kinds of gradients, in PyTorch, NumPy or TensorFlow: the
gradient is taken in, entries are selected, packed, and taken out of the residual; and, in a row of its own, what comes after
the collective. Rows take turns, with the unit before and after each. Fails when a selection is
not what the NumPy oracle selects, and with --bars when a row takes longer than it may.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import selection_memory as memory
import selection_report as report
from selection_contestants import Measured, Rows
from selection_rows import CASES, Case, Conditions
from selection_turns import take_turns, unit
from selection_worker import make_backend
from tqdm import tqdm

from horovod_sparse import kernels
from horovod_sparse.tools.quantities import parse_count


def measure(conditions: Conditions, cases: Sequence[Case], arguments: argparse.Namespace) -> list[Measured]:
    """Time cases under the same conditions."""
    backend = make_backend("numpy" if conditions.backend == "numpy" else "torch", conditions.threads)
    if conditions.backend == "tensorflow":
        from selection_tensorflow import set_threads

        set_threads(conditions.threads)
    rows = Rows(backend, conditions)
    contestants = list(rows.contestants(cases, operations=arguments.operations))
    repetitions = tqdm(range(arguments.repetitions), str(conditions), leave=False, disable=None)
    pairs = [(contestant.result, contestant.run) for contestant in contestants]
    take_turns(pairs, unit(backend, rows.gradients["Laplace"], conditions.size), repetitions)
    for contestant in contestants:
        contestant.finish()
    results = [contestant.result for contestant in contestants]
    if arguments.memory:
        numbers = {case.title: number for number, case in enumerate(CASES)}
        for result in tqdm(results, "memory", leave=False, disable=None):
            if result.title in numbers:
                result.memory = memory.measure(numbers[result.title], conditions)
    return results


@contextlib.contextmanager
def kernels_set(variant: str) -> Iterator[None]:
    """Use one variant of the compiled kernels, or none, inside the block."""
    before = os.environ.get(kernels.VARIABLE)
    os.environ[kernels.VARIABLE] = variant
    try:
        yield
    finally:
        del os.environ[kernels.VARIABLE]
        if before is not None:
            os.environ[kernels.VARIABLE] = before


def held(results: Sequence[Measured]) -> int:
    """Print the rows that take longer than they may, and return the exit status."""
    barred = [result for result in results if result.within is not None]
    if not barred:
        raise SystemExit("--bars needs rows that have one: of 1M, 25M or 100M elements, with kernels and one thread")
    exceeded = [result for result in barred if not result.within]
    for result in exceeded:
        print(f"{result.conditions}: {result.title} takes {result.units:.2f} units, more than {result.bar:g}")
    print(f"{len(barred) - len(exceeded)} of {len(barred)} rows are within their bars.")
    return 1 if exceeded else 0


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = options.add_argument
    sizes = partial(parse_count, "sizes")
    add("--sizes", nargs="+", type=sizes, default=[25_000_000], metavar="N", help="elements, as 1000000 or 25M")
    add("--ratios", nargs="+", type=float, default=[0.001], metavar="RATIO", help="of the entries that are sent")
    add("--threads", nargs="+", type=int, default=[1], metavar="N", help="of PyTorch and the kernels")
    add("--repetitions", type=int, default=15, metavar="N")
    add("--rows", nargs="+", default=[""], metavar="TEXT", help="only rows whose titles contain one of these")
    add("--backend", choices=["torch", "numpy", "tensorflow"], default="torch")
    variants = ["auto", "off", *kernels.NAMES]
    text = f"any of {', '.join(variants)}"
    add("--kernels", nargs="+", choices=variants, default=["auto"], metavar="VARIANT", help=text)
    add("--memory", action="store_true", help="measure each row's memory too, in a process of its own")
    add("--operations", action="store_true", help="say where the time goes; in the whole step, also what is not timed")
    add("--bars", action="store_true", help="exit with status 1 if a row takes longer than it may")
    add("--markdown", action="store_true", help="print Markdown")
    add("--json", type=Path, metavar="FILE")
    add("--picture", type=Path, metavar="FILE")
    return options


def main() -> int:
    arguments = parser().parse_args()
    if arguments.backend == "tensorflow" and len(arguments.threads) > 1:
        raise SystemExit("--threads must be one number with --backend tensorflow, which cannot change it in a process")
    here = ["off", *(["auto", *kernels.variants()] if kernels.variants() else [])]
    missing = set(arguments.kernels).difference(here)
    if missing:
        raise SystemExit(f"--kernels must be among {', '.join(here)} on this machine, got {', '.join(missing)}")
    cases = [case for case in CASES if any(text.lower() in case.title.lower() for text in arguments.rows)]
    results = []
    for variant in arguments.kernels:
        with kernels_set(variant):
            for threads, size, ratio in product(arguments.threads, arguments.sizes, arguments.ratios):
                conditions = Conditions(size, ratio, threads, arguments.backend, kernels.variant())
                results += measure(conditions, cases, arguments)
    print(report.markdown(results) if arguments.markdown else report.text(results))
    if arguments.json:
        report.write_json(results, arguments.json)
    if arguments.picture:
        report.draw(results, arguments.picture)
    return held(results) if arguments.bars else 0


if __name__ == "__main__":
    raise SystemExit(main())
