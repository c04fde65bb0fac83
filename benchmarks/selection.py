"""How long every compressor's step takes, in units of what error feedback costs at least: `residual.add_(gradient)`.

    python benchmarks/selection.py [--sizes 25M] [--ratios 0.001] [--threads 1] [--memory]
    python benchmarks/selection.py --sizes 8M --data signs zeros
    python benchmarks/selection.py --rows TopK --compression mine:RMSThreshold
    HOROVOD_SPARSE_KERNELS=avx2 python benchmarks/selection.py

Times one worker's whole step but for the collectives, on three kinds of gradients, in PyTorch: the gradient is taken in,
entries are selected, packed, and taken out of the residual; and, in a row of its own, what comes after the collective. Rows
take turns, with the unit before and after each. Prints a table for each size, ratio and number of threads: medians and
quartiles of the quotients, and how many units a row may take at most. Fails when a selection is not what the NumPy oracle
selects. With `--data`, the table shows instead how many times its own units on Gaussian gradients a row takes on gradients
of other kinds.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path

import machine
import markdown
import numpy as np
import torch
from plain import plain_sidco
from selection_worker import CASES, ODD, USUAL, Case, Conditions, Gradients, Worker, memory, zeros
from torch import Tensor
from tqdm import tqdm

from horovod_sparse.tools.quantities import parse_count

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from own import own_class

ELEMENTS = 2_000_000
"""Steps of small buckets are repeated until this many elements have been processed."""
Run = Callable[[], float]
"""Takes a step and returns its seconds."""
COLUMNS = ("row", "units", "quartiles", "at most", "GB/s", "memory")


@dataclass
class Contestant:
    """Something that is timed, and its measurements."""

    title: str
    run: Run
    bar: float | None = None
    """The most units that it may take."""
    check: Callable[[], None] = lambda: None
    """Is called after the last repetition."""
    quotients: list[float] = field(default_factory=list)
    """Time in units, one number per repetition."""
    seconds: list[float] = field(default_factory=list)

    def cells(self, size: int, memory: float | None) -> list[str]:
        """Return a line of a table, with the columns of `COLUMNS`."""
        low, units, high = np.quantile(self.quotients, (0.25, 0.5, 0.75))
        over = " (over)" if self.bar is not None and units > self.bar else ""
        bar = "" if self.bar is None else f"{self.bar:g}"
        # The unit moves 12 bytes per element.
        rate = 12e-9 * size / float(np.median(self.seconds))
        share = "" if memory is None else f"{100 * memory:.1f} %"
        return [self.title, f"{units:.2f}{over}", f"{low:.2f}-{high:.2f}", bar, f"{rate:.0f}", share]


def contestants(cases: Sequence[Case], conditions: Conditions) -> Iterator[Contestant]:
    """Yield what is timed under the same conditions, ready to be timed."""
    gradients = {data: Gradients(conditions.size, data) for data in USUAL}
    for case in tqdm(cases, "warming up", leave=False, disable=None):
        yield contestant(case, conditions, gradients[case.data])
    yield from comparisons(conditions, gradients["Laplace"])


def contestant(case: Case, conditions: Conditions, gradients: Gradients) -> Contestant:
    """Return a case that is ready to be timed."""
    worker = Worker(case, conditions, gradients)
    worker.check()
    return Contestant(case.title, worker.run, case.bar(conditions), worker.check)


def comparisons(conditions: Conditions, gradients: Gradients) -> Iterator[Contestant]:
    """Yield other operations on a gradient to compare with."""
    k = max(1, math.floor(round(conditions.ratio * conditions.size, 6)))
    residual = zeros(conditions.size)
    others: dict[str, Callable[[Tensor], object]] = {
        "residual.add_(gradient): the unit": residual.add_,
        "torch.topk(x.abs(), k) alone": lambda x: torch.topk(x.abs(), k),
        "SIDCo in plain torch operations": lambda x: plain_sidco(residual, x, conditions.ratio),
        # What Horovod's `Compression.fp16` does.
        "fp16: cast and back": lambda x: x.half().float(),
    }
    for title, operation in others.items():
        run = timed(operation, gradients)
        run()
        yield Contestant(title, run)


def timed(operation: Callable[[Tensor], object], gradients: Gradients) -> Run:
    """Return what times an operation on the next gradient."""

    def run() -> float:
        gradient = gradients.next()
        begun = time.perf_counter()
        operation(gradient)
        return time.perf_counter() - begun

    return run


def take_turns(contestants: Sequence[Contestant], unit: Run, size: int, repetitions: Iterable[int]) -> None:
    """Time contestants, and the unit before and after each."""
    steps = max(1, ELEMENTS // size)

    def seconds(run: Run) -> float:
        if steps > 1:
            # This brings what fits into the cache there, for the unit as for a contestant.
            run()
        return sum(run() for _ in range(steps)) / steps

    gc.disable()
    for _ in repetitions:
        before = seconds(unit)
        for one in contestants:
            # The processor is shared, so its speed changes. The unit is timed just before and just after the contestant.
            # It is timed once between two contestants: a second time in a row it would be faster.
            spent, after = seconds(one.run), seconds(unit)
            one.quotients.append(2.0 * spent / (before + after))
            one.seconds.append(spent)
            before = after
        gc.collect()
    gc.enable()


def take_all_turns(rows: Sequence[Contestant], conditions: Conditions, arguments: argparse.Namespace) -> None:
    """Time contestants under the same conditions, and check what they have selected."""
    # The least work of a selection with error feedback.
    unit = timed(zeros(conditions.size).add_, Gradients(conditions.size, "Laplace"))
    repetitions = tqdm(range(arguments.repetitions), str(conditions), leave=False, disable=None)
    take_turns(rows, unit, conditions.size, repetitions)
    for row in rows:
        row.check()


def measure(conditions: Conditions, cases: Sequence[Case], arguments: argparse.Namespace) -> list[list[str]]:
    """Time cases under the same conditions; the lines of their table."""
    rows = list(contestants(cases, conditions))
    take_all_turns(rows, conditions, arguments)
    taken = [memory(row.title, conditions) if arguments.memory else None for row in rows]
    return [row.cells(conditions.size, share) for row, share in zip(rows, taken, strict=True)]


def beside_gaussian(conditions: Conditions, cases: Sequence[Case], arguments: argparse.Namespace) -> list[list[str]]:
    """Time each case on kinds of gradients; lines of its units on Gaussian ones, and of the others' multiples of them."""
    lines = []
    for case in cases:
        kinds = [replace(case, data=data) for data in ("Gaussian", *arguments.data)]
        rows = [contestant(kind, conditions, Gradients(conditions.size, kind.data)) for kind in kinds]
        take_all_turns(rows, conditions, arguments)
        units, *others = (float(np.median(row.quotients)) for row in rows)
        lines.append([case.name, f"{units:.2f}", *(f"{other / units:.2f}" for other in others)])
    return lines


def main() -> None:
    options = machine.parser(__doc__)
    add = options.add_argument
    sizes = partial(parse_count, "sizes")
    add("--sizes", nargs="+", type=sizes, default=[25_000_000], metavar="N", help="elements, as 1000000 or 25M")
    add("--ratios", nargs="+", type=float, default=[0.001], metavar="RATIO", help="of the entries that are sent")
    add("--threads", nargs="+", type=int, default=[1], metavar="N", help="of PyTorch and the kernels")
    add("--repetitions", type=int, default=15, metavar="N")
    add("--rows", nargs="+", default=[""], metavar="TEXT", help="only rows whose titles contain one of these")
    add("--memory", action="store_true", help="measure each row's memory too, in a process of its own")
    add(
        "--data",
        nargs="+",
        default=[],
        choices=[*USUAL, *ODD],
        help="time the rows on these gradients beside Gaussian ones",
    )
    add("--compression", type=own_class, metavar="CLASS", help="a compressor of one's own, module:Class: one more row")
    arguments = options.parse_args()
    own = arguments.compression
    if own is not None and arguments.memory:
        options.error("--memory must be left out with --compression: it is measured for the package's own rows")
    cases = [case for case in CASES if any(text.lower() in case.title.lower() for text in arguments.rows)]
    if own is not None:
        cases.append(Case(own.__name__, partial(own, warmup=None), {}))
    columns: Sequence[str] = COLUMNS
    if arguments.data:
        columns = ("row", "Gaussian: units", *arguments.data)
        cases = [case for case in cases if case.data == "Laplace" and not case.cold and not case.receives]
    print(f"{machine.describe()}; {', '.join(f'{name} {metadata.version(name)}' for name in ('torch', 'numpy'))}")
    for threads, size, ratio in product(arguments.threads, arguments.sizes, arguments.ratios):
        conditions = Conditions(size, ratio, threads)
        torch.set_num_threads(threads)
        lines = (beside_gaussian if arguments.data else measure)(conditions, cases, arguments)
        print(f"\n{conditions}:\n\n{markdown.table(columns, lines)}", flush=True)


if __name__ == "__main__":
    main()
