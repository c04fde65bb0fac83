"""What is timed: cases, the same steps in TensorFlow, and other operations to compare with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from horovod.torch.compression import Compression
from plain import plain_sidco
from selection_rows import DATA, Case, Conditions
from selection_turns import Contestant, Run
from selection_worker import Backend, Gradients, Worker
from torch import Tensor
from tqdm import tqdm

from horovod_sparse.compressors.threshold import Threshold
from horovod_sparse.ops.protocol import Array


class Rows:
    """Makes contestants under the same conditions."""

    def __init__(self, backend: Backend, conditions: Conditions) -> None:
        self.backend = backend
        self.conditions = conditions
        self.gradients = {data: Gradients(backend, conditions.size, draw) for data, draw in DATA.items()}

    def contestants(self, cases: Sequence[Case]) -> Iterator[Contestant]:
        """Yield the contestants of a back end, ready to be timed."""
        for case in tqdm(cases, "warming up", leave=False, disable=None):
            yield from self._in_tensorflow(case) if self.conditions.backend == "tensorflow" else [self._case(case)]
        if self.conditions.backend == "torch":
            yield from map(self._comparison, *zip(*comparisons(self.conditions).items(), strict=True))

    def _case(self, case: Case) -> Contestant:
        stepper = Stepper(case, self.backend, self.conditions, self.gradients[case.data])
        stepper.warm_up()
        stepper.worker.check()
        bar = case.bar(self.conditions)
        return Contestant(case.title, self.conditions, stepper.run, bar, lambda: stepper.worker.check())

    def _comparison(self, title: str, operation: Callable[[Tensor], object]) -> Contestant:
        def run() -> float:
            gradient = self.gradients["Laplace"].next()
            begun = time.perf_counter()
            operation(gradient)
            return time.perf_counter() - begun

        run()
        return Contestant(title, self.conditions, run)

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
        return Contestant(f"{case.title}, whole step in {place}", self.conditions, run)


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
