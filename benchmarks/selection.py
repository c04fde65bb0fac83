"""How long every compressor's step takes, in units of what error feedback costs at least: `residual.add_(gradient)`.

    python benchmarks/selection.py [--sizes 25M] [--ratios 0.001] [--threads 1] [--memory]
    HOROVOD_SPARSE_KERNELS=avx2 python benchmarks/selection.py

Times one worker's whole step but for the collectives, on three kinds of gradients, in PyTorch, NumPy or TensorFlow: the
gradient is taken in, entries are selected, packed, and taken out of the residual; and, in a row of its own, what comes after
the collective. Rows take turns, with the unit before and after each. Prints a table for each size, ratio and number of
threads: medians and quartiles of the quotients, and how many units a row may take at most. Fails when a selection is not
what the NumPy oracle selects.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from itertools import product

import machine
import markdown
import selection_memory as memory
from selection_contestants import Rows
from selection_rows import CASES, Case, Conditions
from selection_turns import COLUMNS, take_turns, unit
from selection_worker import make_backend
from tqdm import tqdm

from horovod_sparse import kernels
from horovod_sparse.tools.quantities import parse_count


def measure(conditions: Conditions, cases: Sequence[Case], arguments: argparse.Namespace) -> list[list[str]]:
    """Time cases under the same conditions; the lines of their table."""
    backend = make_backend("numpy" if conditions.backend == "numpy" else "torch", conditions.threads)
    if conditions.backend == "tensorflow":
        from selection_tensorflow import set_threads

        set_threads(conditions.threads)
    rows = Rows(backend, conditions)
    contestants = list(rows.contestants(cases))
    repetitions = tqdm(range(arguments.repetitions), str(conditions), leave=False, disable=None)
    take_turns(contestants, unit(backend, rows.gradients["Laplace"], conditions.size), repetitions)
    for contestant in contestants:
        contestant.finish()
    if arguments.memory:
        numbers = {case.title: number for number, case in enumerate(CASES)}
        for contestant in tqdm(contestants, "memory", leave=False, disable=None):
            if contestant.title in numbers:
                contestant.memory = memory.measure(numbers[contestant.title], conditions)
    return [contestant.cells() for contestant in contestants]


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
    add("--memory", action="store_true", help="measure each row's memory too, in a process of its own")
    return options


def main() -> None:
    arguments = parser().parse_args()
    if arguments.backend == "tensorflow" and len(arguments.threads) > 1:
        raise SystemExit("--threads must be one number with --backend tensorflow, which cannot change it in a process")
    cases = [case for case in CASES if any(text.lower() in case.title.lower() for text in arguments.rows)]
    print(f"{machine.describe()}; {', '.join(f'{name} {metadata.version(name)}' for name in ('torch', 'numpy'))}")
    for threads, size, ratio in product(arguments.threads, arguments.sizes, arguments.ratios):
        conditions = Conditions(size, ratio, threads, arguments.backend, kernels.variant())
        table = markdown.table(COLUMNS, measure(conditions, cases, arguments))
        print(f"\n{conditions}:\n\n{table}", flush=True)


if __name__ == "__main__":
    main()
