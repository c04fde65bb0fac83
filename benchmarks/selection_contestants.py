"""What is timed: cases, the same steps in TensorFlow, and other operations to compare with."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from horovod.torch.compression import Compression
from selection_rows import DATA, Case, Conditions
from selection_turns import ELEMENTS, Result, Run
from selection_worker import Backend, Gradients, Worker
from torch import Tensor
from tqdm import tqdm

from horovod_sparse.compressors.threshold import Threshold
from horovod_sparse.ops.protocol import Array, Ops


@dataclass
class Measured(Result):
    """The measurements of one contestant, with more than its times."""

    bar: float | None = None
    operations: dict[str, float] = field(default_factory=dict)
    """Units per step spent in each array operation, if operations were timed."""
    memory: float | None = None
    """Peak memory of a step beyond residual, gradient and reduced gradient, as a fraction of the residual."""

    @property
    def within(self) -> bool | None:
        """Whether the row is within its bar; None if it has no bar."""
        return None if self.bar is None else self.units <= self.bar

    def cells(self) -> dict[str, str]:
        """Return a line of a table, by the titles of the columns."""
        memory = "" if self.memory is None else f"{self.memory:.1%}"
        bar = "" if self.bar is None else f"{self.bar:g}" + ("" if self.within else " exceeded")
        return {**super().cells(), "memory": memory, "bar": bar}

    def as_json(self) -> dict[str, Any]:
        """Return everything, with each repetition."""
        return {**asdict(self), "units": self.units}


@dataclass(frozen=True)
class Contestant:
    """Something that is timed."""

    result: Measured
    run: Run
    finish: Callable[[], None] = lambda: None
    """Is called after the last repetition."""


class Rows:
    """Makes contestants under the same conditions."""

    def __init__(self, backend: Backend, conditions: Conditions) -> None:
        self.backend = backend
        self.conditions = conditions
        self.gradients = {data: Gradients(backend, conditions.size, draw) for data, draw in DATA.items()}

    def contestants(self, cases: Sequence[Case], *, operations: bool) -> Iterator[Contestant]:
        """Yield the contestants of a back end, ready to be timed."""
        for case in tqdm(cases, "warming up", leave=False, disable=None):
            yield from (
                self._in_tensorflow(case) if self.conditions.backend == "tensorflow" else [self._case(case, operations)]
            )
        if self.conditions.backend == "torch":
            yield from map(self._comparison, *zip(*comparisons(self.conditions).items(), strict=True))

    def _case(self, case: Case, operations: bool) -> Contestant:
        clock = Operations(self.backend.ops)
        backend = replace(self.backend, ops=cast(Ops, clock)) if operations else self.backend
        stepper = Stepper(case, backend, self.conditions, self.gradients[case.data])
        result = Measured(case.title, self.conditions, bar=case.bar(self.conditions))

        def finish() -> None:
            result.operations = clock.units(result) if operations else {}
            stepper.worker.check()

        stepper.warm_up()
        stepper.worker.check()
        clock.seconds.clear()
        return Contestant(result, stepper.run, finish)

    def _comparison(self, title: str, operation: Callable[[Tensor], object]) -> Contestant:
        def run() -> float:
            gradient = self.gradients["Laplace"].next()
            begun = time.perf_counter()
            operation(gradient)
            return time.perf_counter() - begun

        run()
        return Contestant(Measured(title, self.conditions), run)

    def _step(self, worker: Any, gradients: Any) -> Any:
        return worker.step(self.backend.host(gradients.next()))

    def _in_tensorflow(self, case: Case) -> Iterator[Contestant]:
        """Yield whole steps in TensorFlow, and the same steps in PyTorch."""
        from selection_tensorflow import GraphWorker

        if case.row.world > 1 or case.cold:
            return
        gradients = self.gradients[case.data]
        for place, traced in (("eager code", False), ("a tf.function", True)):
            graph = GraphWorker(case.row, self.conditions, traced=traced)
            yield self._whole(case, place, partial(self._step, graph, gradients))
        stepper = Stepper(case, self.backend, self.conditions, gradients, whole=True)
        yield self._whole(case, "PyTorch", stepper.run)

    def _whole(self, case: Case, place: str, run: Run) -> Contestant:
        for _ in range(case.row.warm_steps):
            run()
        return Contestant(Measured(f"{case.title}, whole step in {place}", self.conditions), run)


class Stepper:
    """Takes the steps of a case. With `whole`, the parts before and after the last collective are both timed."""

    def __init__(
        self, case: Case, backend: Backend, conditions: Conditions, gradients: Gradients, *, whole: bool = False
    ) -> None:
        self._case, self._backend, self._conditions, self._gradients = case, backend, conditions, gradients
        self._whole = whole
        self._dense = backend.zeros(conditions.size) if whole or case.row.receives else None
        self.start()

    def start(self) -> None:
        """Start with a new worker, which keeps nothing from earlier steps."""
        self.worker = Worker(self._backend, self._case.row, self._conditions, self._dense)

    def warm_up(self) -> None:
        """Take steps until the next one can be timed."""
        for _ in range(1 if self._case.cold else self._case.row.warm_steps + 1):
            self.step(self._gradients.next())

    def run(self) -> float:
        """Take a step with a new gradient, and return the seconds of what is timed."""
        if self._case.cold:
            self.start()
        return self.step(self._gradients.next())

    def step(self, gradient: Array) -> float:
        """Take a step, and return the seconds of what is timed."""
        if isinstance(self.worker.compressor, Threshold):
            self._set_threshold(self.worker.compressor, gradient)
        spent = self.worker.step(gradient)
        return sum(spent) if self._whole else self._case.row.part(spent)

    def _set_threshold(self, compressor: Threshold, gradient: Array) -> None:
        # A fixed threshold sends more in every step until residuals are as large as the threshold, after 1/ratio steps. But
        # the cost of sending about k entries is wanted. So a sample gives the threshold that sends about k in this step.
        stride = max(1, self._conditions.size // 100_000)
        sample = self.worker.residual[::stride] + self._backend.host(gradient)[::stride]
        compressor.threshold = float(np.quantile(np.abs(sample), 1.0 - self._conditions.ratio))


class Operations:
    """Array operations that record how long they take."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.seconds: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._ops, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return operation(*arguments, **options)
            finally:
                self.seconds[name] += time.perf_counter() - begun

        return timed

    def units(self, result: Result) -> dict[str, float]:
        """Return the units per step of each operation, the slowest first."""
        steps = max(1, ELEMENTS // result.conditions.size)
        total = sum(result.seconds) * (steps + (steps > 1))
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])
        return {name: seconds / total * result.units for name, seconds in slowest}


def comparisons(conditions: Conditions) -> Mapping[str, Callable[[Tensor], object]]:
    """Return other operations on a gradient to compare with, by title."""
    k = max(1, math.floor(round(conditions.ratio * conditions.size, 6)))
    residual = torch.zeros(conditions.size)
    residual.fill_(0.0)
    return {
        "torch.topk(x.abs(), k) alone": lambda x: torch.topk(x.abs(), k),
        "SIDCo in plain torch operations": lambda x: plain_sidco(residual, x, conditions.ratio),
        "fp16: cast and back": lambda x: Compression.fp16.decompress(*Compression.fp16.compress(x)),
    }


def plain_sidco(residual: Tensor, gradient: Tensor, ratio: float, stages: int = 3) -> tuple[Tensor, Tensor]:
    """Take a whole step of SIDCo with exponential stages, written the obvious way, and return indices and values."""
    residual.add_(gradient)
    magnitudes = residual.abs()
    first = max(0.25, ratio)
    threshold = magnitudes.mean() * math.log(1.0 / first)
    rest = (ratio / first) ** (1.0 / (stages - 1))
    for _ in range(stages - 1):
        tail = magnitudes[magnitudes > threshold]
        threshold = threshold + (tail.mean() - threshold) * math.log(1.0 / rest)
    indices = (magnitudes > threshold).nonzero().view(-1)
    values = residual[indices]
    residual[indices] = 0.0
    return indices, values
