"""Times all rows in turn, again and again, and the unit beside each row. Needs PyTorch and Horovod for PyTorch."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from horovod_sparse import kernels
from horovod_sparse.tools.bench.backends import Unit, comparisons, make_backend
from horovod_sparse.tools.bench.rows import ROWS, Conditions, Row, bar_of
from horovod_sparse.tools.bench.worker import Backend, Gradients, Verbs, Worker

_ELEMENTS = 2_000_000
"""Steps of small buckets are repeated until this many elements have been processed."""


@dataclass
class Result:
    """The measurements of one row."""

    title: str
    conditions: Conditions
    bar: float | None
    quotients: list[float] = field(default_factory=list)
    """Time in units, one number per repetition."""
    seconds: list[float] = field(default_factory=list)
    verbs: dict[str, float] = field(default_factory=dict)
    """Units per step spent in each array verb, if verbs were timed."""
    memory: float | None = None
    """Peak memory of a step beyond residual, gradient and reduced gradient, as a fraction of the residual."""

    def quantile(self, part: float) -> float:
        return float(np.quantile(self.quotients, part))

    @property
    def units(self) -> float:
        return self.quantile(0.5)

    @property
    def gigabytes(self) -> float:
        """The 12 bytes per element of the unit, divided by the time taken, in 10^9 bytes per second."""
        return 12e-9 * self.conditions.size / float(np.median(self.seconds))

    @property
    def within(self) -> bool | None:
        """Whether the row is within its bar; None if it has no bar."""
        return None if self.bar is None else self.units <= self.bar


@dataclass
class _Timed:
    result: Result
    run: Callable[[], float]
    """Take one step and return its seconds."""
    finish: Callable[[], None]


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


def measure(
    conditions: Conditions, rows: Sequence[Row], repetitions: int, *, memory: bool = False, verbs: bool = False
) -> list[Result]:
    """Time all rows under the same conditions."""
    with kernels_set(conditions.kernels):
        backend = make_backend(conditions.backend, conditions.threads)
        gradients = Gradients(backend, conditions.size)
        unit = Unit(backend, gradients, conditions.size)
        timed = list(_timed(conditions, rows, backend, gradients, verbs))
        steps = max(1, _ELEMENTS // conditions.size)

        def seconds(step: Callable[[], float]) -> float:
            if steps > 1:
                # This brings what fits into the cache there, for the unit as for a row.
                step()
            return sum(step() for _ in range(steps)) / steps

        seconds(unit.seconds)
        gc.disable()
        for _ in progress(range(repetitions), f"{conditions.size:,} elements, ratio {conditions.ratio}"):
            before = seconds(unit.seconds)
            for row in timed:
                spent = seconds(row.run)
                after = seconds(unit.seconds)
                # The processor is shared, so its speed changes. The unit is timed just before and just after the row.
                row.result.quotients.append(2.0 * spent / (before + after))
                row.result.seconds.append(spent)
                before = after
            gc.collect()
        gc.enable()
        for row in timed:
            row.finish()
        results = [row.result for row in timed]
        if memory:
            by_title = {row.title: number for number, row in enumerate(ROWS)}
            for result in progress(results, "memory"):
                if result.title in by_title:
                    result.memory = _memory(by_title[result.title], conditions)
    return results


def _timed(
    conditions: Conditions, rows: Sequence[Row], backend: Backend, gradients: Gradients, verbs: bool
) -> Iterator[_Timed]:
    """Yield rows that are ready to be timed. They are warm, except those that must be cold."""
    if conditions.backend == "tensorflow":
        yield from _timed_tensorflow(conditions, rows, backend, gradients)
        return
    dense = backend.ops.zeros(conditions.size, "float32", backend.like)
    backend.host(dense).fill(0.0)
    for row in progress(rows, "warming up"):
        yield _timed_row(conditions, row, backend, gradients, dense, verbs)
    if conditions.backend == "torch":
        for title, run in comparisons(conditions.ratio, conditions.size).items():
            yield _timed_comparison(title, run, conditions, gradients)


def _timed_row(
    conditions: Conditions, row: Row, backend: Backend, gradients: Gradients, dense: Any, verbs: bool
) -> _Timed:
    clock: Verbs | None = None
    if verbs:
        backend, clock = Verbs.of(backend)
    worker = Worker(backend, row, conditions.ratio, conditions.size, dense)
    result = Result(row.title, conditions, bar_of(row, conditions))

    def run() -> float:
        if row.cold:
            worker.start()
        return worker.step(gradients.next(row.data))

    def finish() -> None:
        worker.check()
        if clock is not None:
            total = sum(result.seconds) or 1.0
            calls = max(1, _ELEMENTS // conditions.size)
            calls += calls > 1
            result.verbs = {
                name: calls_seconds / (total * calls) * result.units
                for name, calls_seconds in sorted(clock.seconds.items(), key=lambda item: -item[1])
            }

    if not row.cold:
        for _ in range(row.warm_steps):
            worker.step(gradients.next(row.data))
    worker.step(gradients.next(row.data))
    worker.check()
    if clock is not None:
        clock.seconds.clear()
    return _Timed(result, run, finish)


def _timed_comparison(
    title: str, run: Callable[[torch.Tensor], object], conditions: Conditions, gradients: Gradients
) -> _Timed:
    def seconds() -> float:
        gradient = gradients.next("Laplace")
        begun = time.perf_counter()
        run(gradient)
        return time.perf_counter() - begun

    seconds()
    return _Timed(Result(title, conditions, None), seconds, lambda: None)


def _timed_tensorflow(
    conditions: Conditions, rows: Sequence[Row], backend: Backend, gradients: Gradients
) -> Iterator[_Timed]:
    """Yield whole steps in TensorFlow, and the same steps in PyTorch."""
    from horovod_sparse.tools.bench.tensorflow import GraphWorker, set_threads

    set_threads(conditions.threads)
    dense = backend.ops.zeros(conditions.size, "float32", backend.like)
    for row in progress([row for row in rows if row.world == 1 and not row.cold], "warming up"):
        for place, traced in (("eager code", False), ("a tf.function", True)):
            graph = GraphWorker(row, conditions.ratio, conditions.size, traced=traced)

            def run(worker: GraphWorker = graph, data: str = row.data) -> float:
                return worker.step(backend.host(gradients.next(data)))

            yield _timed_whole(conditions, row, place, run)
        worker = Worker(backend, row, conditions.ratio, conditions.size, dense, whole=True)

        def step(worker: Worker = worker, data: str = row.data) -> float:
            return worker.step(gradients.next(data))

        yield _timed_whole(conditions, row, "PyTorch", step)


def _timed_whole(conditions: Conditions, row: Row, place: str, run: Callable[[], float]) -> _Timed:
    for _ in range(row.warm_steps):
        run()
    return _Timed(Result(f"{row.title}, whole step in {place}", conditions, None), run, lambda: None)


def _memory(row: int, conditions: Conditions) -> float | None:
    """Measure the memory of a row in a process of its own, so that nothing is left of other rows."""
    if not Path("/proc/self/clear_refs").exists() or conditions.backend == "tensorflow":
        return None
    arguments = [row, conditions.size, conditions.ratio, conditions.threads, conditions.backend]
    done = subprocess.run(
        [sys.executable, "-m", "horovod_sparse.tools.bench.memory", *map(str, arguments)],
        # These make freed memory go back to the system, so that the next step's peak shows it again.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout) / (4 * conditions.size)


def progress(items: Sequence[Any] | range, what: str) -> Iterable[Any]:
    """Return the items, with a progress bar if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    # disable=None: no bar if standard error is not a terminal.
    shown: Iterable[Any] = tqdm(items, what, leave=False, disable=None)
    return shown
