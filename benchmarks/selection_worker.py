"""All rows that are timed, the kinds of gradients, and one worker's steps."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import horovod_sparse.compressors as sparse
from horovod_sparse import kernels
from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.core.layout import Parameter, Slot
from horovod_sparse.core.plan import layouts_of
from horovod_sparse.core.step import Step
from horovod_sparse.exchange import wire
from horovod_sparse.exchange.protocols import Collective, Entries, Messages, Reduced
from horovod_sparse.exchange.union import Union
from horovod_sparse.numpy.ops import NumpyOps
from horovod_sparse.ops.protocol import Array, Ops
from horovod_sparse.torch.compiled import tensor_ops

BAR_SIZES = (25_000_000, 100_000_000)
SMALL, SMALL_BAR = 1_000_000, 2.2
"""A number of elements that stays in the processor's cache, and the units that a step may take then."""
PORTABLE = 1.5
"""Factor on a bar for kernels that use only the vectors that every processor of its kind has."""


@dataclass(frozen=True)
class Conditions:
    """The conditions under which rows are timed."""

    size: int
    ratio: float
    threads: int

    def __str__(self) -> str:
        where = f"kernels: {kernels.variant()}, threads: {self.threads}"
        return f"{self.size:,} elements, ratio {self.ratio:g}, {where}"


@dataclass(frozen=True)
class Case:
    """A part of one worker's step, on what gradients it is timed, and how long it may take."""

    name: str
    make: Callable[[float], Compressor]
    """Returns the compressor with a ratio."""
    bars: Mapping[float, float]
    """The most units that the row may take, by ratio; see `bar`."""
    data: str = "Laplace"
    cold: bool = False
    """True if the first step of a new worker is timed, and not one of many."""
    world: int = 1
    receives: bool = False
    """True if writing all workers' messages is timed, and not making this worker's own."""
    warm_steps: int = 25
    """Number of steps before the first that is timed. Thresholds have settled by then."""

    @property
    def title(self) -> str:
        """The name, and what is unlike others."""
        data = "" if self.data == "Laplace" else f", {self.data}"
        return f"{self.name}{data}{', first step' if self.cold else ''}"

    def bar(self, conditions: Conditions) -> float | None:
        """The units that the row may take under these conditions, or None if there is no such bar."""
        bar, variant = self.bars.get(conditions.ratio), kernels.variant()
        if bar is None or conditions.threads != 1 or variant == "off" or conditions.size not in (*BAR_SIZES, SMALL):
            return None
        if conditions.size == SMALL:
            bar = max(bar, SMALL_BAR)
        return bar if variant in ("avx2", "avx512") else PORTABLE * bar


def _constant(cls: Callable[..., Compressor], **chosen: Any) -> Callable[[float], Compressor]:
    """A compressor with the same ratio in all steps."""
    return partial(cls, warmup=None, **chosen)


def _threshold(ratio: float) -> Compressor:
    # This is the first threshold. A new one is set before every step, so that about k entries are above it.
    return sparse.Threshold(-math.log(ratio), ratio=ratio, slack=2.0)


CASES = (
    *(
        Case(f"SIDCo, {fit}", _constant(sparse.SIDCo, distribution=fit), {0.001: 1.8, 0.01: 2.2, 0.1: 4.0}, data)
        for data in ("Laplace", "Gaussian", "heavy tails")
        for fit in ("exponential", "gamma", "gpareto")
    ),
    Case("TopK", _constant(sparse.TopK), {0.001: 1.7, 0.01: 2.8, 0.1: 6.0}),
    Case("TopK", _constant(sparse.TopK), {0.001: 2.5}, cold=True),
    Case("GaussianK", _constant(sparse.GaussianK), {0.001: 1.6, 0.01: 2.2}),
    Case("DGC", _constant(sparse.DGC), {0.001: 2.4}),
    Case("RedSync", _constant(sparse.RedSync), {0.001: 1.7}),
    Case("MiCRO, 8 workers", _constant(sparse.MiCRO), {0.001: 1.3, 0.01: 2.2}, world=8),
    Case("RandomK", _constant(sparse.RandomK), {0.001: 1.2, 0.1: 6.0}),
    Case("RandomBlock", _constant(sparse.RandomBlock), {0.001: 1.1}),
    Case("Threshold", _threshold, {0.001: 1.5}),
    Case("NoOp", lambda ratio: sparse.NoOp(), {0.001: 3.0}, warm_steps=2),
    Case("decompress, 4 workers", _constant(sparse.TopK), {0.001: 0.7}, world=4, receives=True),
)


def laplace(rng: np.random.Generator, size: int) -> NDArray[Any]:
    """Draw entries from the Laplace distribution."""
    entries = rng.standard_exponential(size, np.float32)
    entries.view(np.uint32)[...] |= rng.integers(2, size=size, dtype=np.uint32) << 31
    return entries


def normal(rng: np.random.Generator, size: int) -> NDArray[Any]:
    """Draw entries from the normal distribution."""
    return rng.standard_normal(size, np.float32)


def signs(rng: np.random.Generator, size: int) -> NDArray[Any]:
    """Draw 1 and -1."""
    return np.float32(1) - np.float32(2) * rng.integers(2, size=size).astype(np.float32)


def noisy_signs(rng: np.random.Generator, size: int) -> NDArray[Any]:
    """Draw 1 and -1 with 5 % noise."""
    return signs(rng, size) + np.float32(0.05) * normal(rng, size)


def rows(rng: np.random.Generator, size: int) -> NDArray[Any]:
    """Draw rows of 64 normal entries, of which 99 % are zero, as in an embedding."""
    touched = rng.random(-(-size // 64)) < 0.01
    return normal(rng, size) * np.repeat(touched, 64)[:size].astype(np.float32)


def on_a_grid(rng: np.random.Generator, size: int) -> NDArray[Any]:
    """Draw normal entries and cut them off to bfloat16."""
    entries = normal(rng, size)
    entries.view(np.uint32)[...] &= 0xFFFF0000
    return entries


def one_entry(_: np.random.Generator, size: int) -> NDArray[Any]:
    """Draw zeros but for the entry in the middle."""
    entries = np.zeros(size, np.float32)
    entries[size // 2] = 1.0
    return entries


Draw = Callable[[np.random.Generator, int], NDArray[Any]]
USUAL: dict[str, Draw] = {
    "Laplace": laplace,
    "Gaussian": normal,
    "heavy tails": lambda rng, size: laplace(rng, size) * rng.random(size, np.float32) ** 2,
}
ODD: dict[str, Draw] = {
    "signs": signs,
    "zeros": rows,
    "noisy-signs": noisy_signs,
    "bfloat16": on_a_grid,
    "two-humps": lambda rng, size: noisy_signs(rng, size) * np.float32(0.01) ** rng.integers(2, size=size),
    "ramp": lambda _, size: np.linspace(0.0, 1.0, size, dtype=np.float32),
    "denormals": lambda rng, size: normal(rng, size) * np.float32(1e-40),
    "one-entry": one_entry,
}
DATA = {**USUAL, **ODD}
"""What draws the entries of a gradient."""

_OPS = tensor_ops()
_ALIGNMENT = 16
"""Number of elements in a cache line."""
_PEAK = Path("/proc/self/clear_refs")


def zeros(size: int) -> Tensor:
    """Return zeros in memory that has been written to. The system provides memory only then."""
    return torch.zeros(size).fill_(0.0)


class Gradients:
    """Endless gradients of one size. Each begins at another place of a longer array, so none comes again."""

    def __init__(self, size: int, data: str) -> None:
        self._size = size
        self._room = max(size // 4, _ALIGNMENT)
        self._rng = np.random.default_rng(0)
        # Not NumPy's memory, which may have larger pages than a framework's.
        self._entries = zeros(size + self._room)
        self._entries.numpy()[:] = DATA[data](self._rng, size + self._room)

    def next(self) -> Tensor:
        """Return a gradient."""
        start = _ALIGNMENT * int(self._rng.integers(self._room // _ALIGNMENT))
        return self._entries[start : start + self._size]


class Worker:
    """A bucket of one parameter, the first of `case.world` workers.

    What other workers send is made outside of the timed parts.
    """

    def __init__(self, case: Case, conditions: Conditions, gradients: Gradients) -> None:
        self._case, self._conditions, self._gradients = case, conditions, gradients
        self._dense = zeros(conditions.size) if case.receives else None
        """Where the reduced gradient is written."""
        self.start()
        for _ in range(1 if case.cold else case.warm_steps + 1):
            self.step(gradients.next())

    def start(self) -> None:
        """Start anew, with nothing from earlier steps."""
        self.compressor = self._case.make(self._conditions.ratio)
        self._feedback = Feedback(_OPS, self.compressor, world=self._case.world, position=0, rank=0)
        layouts = layouts_of([Parameter("p", (self._conditions.size,), "float32", "cpu")], self.compressor)
        self._feedback.add_buckets(layouts, lambda name: torch.zeros(1))
        (self._bucket,) = self._feedback.buckets
        self.residual: NDArray[Any] = self._bucket.buffer.numpy()
        # The system provides memory when it is first written to. That is not part of a step.
        self.residual.fill(0.0)
        self._writing = 0.0
        """The seconds for which the last step has written."""
        self._former: list[Tensor] = []
        """This worker's messages of the last steps."""

    def run(self) -> float:
        """Take a step with a new gradient, and return the seconds of what is timed."""
        if self._case.cold:
            self.start()
        return self.step(self._gradients.next())

    def step(self, gradient: Tensor) -> float:
        """Take a step, and return the seconds of what is timed."""
        if isinstance(self.compressor, sparse.Threshold):
            self._set_threshold(self.compressor, gradient)
        self._before = self._bucket.state.copied()
        begun = time.perf_counter()
        step = Step(self._feedback)
        sending = step.add("p", gradient)
        assert sending is not None
        request: Collective | None = sending.begin()
        compress, write = time.perf_counter() - begun, 0.0
        while request is not None:
            answer = self._answer(request)
            compress += write
            begun = time.perf_counter()
            request = next((following for _, following in step.advance([(sending, answer)])), None)
            write = time.perf_counter() - begun
        begun = time.perf_counter()
        step.finish(self._write)
        compress += time.perf_counter() - begun - self._writing
        return write + self._writing if self._case.receives else compress

    def _set_threshold(self, compressor: sparse.Threshold, gradient: Tensor) -> None:
        # A fixed threshold sends more in every step until residuals are as large as the threshold, after 1/ratio steps. But
        # the cost of sending about k entries is wanted. So a sample gives the threshold that sends about k in this step.
        stride = max(1, self._conditions.size // 100_000)
        sample = self.residual[::stride] + gradient.numpy()[::stride]
        compressor.threshold = float(np.quantile(np.abs(sample), 1.0 - self._conditions.ratio))

    def _write(self, slots: Sequence[Slot], reduced: Reduced) -> None:
        begun = time.perf_counter()
        self._reduced = reduced
        if self._dense is not None:
            reduced.write([(slots[0].offset, self._dense)])
        self._writing = time.perf_counter() - begun

    def _answer(self, request: Collective) -> Tensor:
        if self._case.world == 1 or request.kind == "allreduce":
            # What others add does not change the work that is left.
            return request.message
        if isinstance(self.compressor.exchange, Union):
            return torch.cat([request.message, *self._other_parts(len(request.message) - wire.HEADER)])
        # The others send what this worker has sent before.
        self._former = [request.message.clone(), *self._former][: self._case.world]
        others = [self._former[min(number, len(self._former) - 1)] for number in range(1, self._case.world)]
        return torch.cat([request.message, *others])

    def _other_parts(self, capacity: int) -> list[Tensor]:
        """Return what the other workers of exchange `union` send, if all have this worker's gradients."""
        messages = []
        for position in range(1, self._case.world):
            state = self._state_of(position)
            indices = self._select(_OPS, self._bucket.buffer, state)
            header = [self._bucket.state.checksum(), wire.float_bits(state.proposal)]
            messages.append(_OPS.pack_indices(indices, header, capacity))
        return messages

    def _state_of(self, position: int) -> BucketState:
        """Return a worker's state before the last step."""
        # A selection may change arrays of its state in place.
        return replace(self._before.copied(), place=self._before.place._replace(position=position))

    def _select(self, ops: Ops, x: Array, state: BucketState) -> Array:
        k = self.compressor.target_count(len(x))
        capacity = self.compressor.message_capacity(len(x), k, self._case.world)
        return self.compressor.select(ops, x, k, capacity, state).indices

    def check(self) -> None:
        """Raise AssertionError unless the last step sent what the NumPy oracle selects: about k entries of a usual gradient."""
        title = f"{self._case.title}, {self._conditions}"
        sent = self._reduced.sent
        if isinstance(sent, Messages):
            mine = wire.split(sent.gathered, len(sent.used))[0]
            sent = Entries(*_OPS.unpack(mine, sent.used[0]))
        assert sent is not None
        x = self.residual.copy()
        indices = np.arange(len(x)) if sent.indices is None else sent.indices.numpy()
        # What was sent is no longer in the residual. Together the two are what was selected from.
        assert not x[indices].any(), f"{title}: what was sent is still in the residual"
        x[indices] = sent.values.numpy()
        selecting = self._case.world if isinstance(self.compressor.exchange, Union) else 1
        due = np.concatenate([self._select(NumpyOps(), x, self._state_of(number)) for number in range(selecting)])
        assert np.array_equal(indices, np.sort(due)), f"{title}: sent {len(indices)} entries, {len(due)} were due"
        if self._case.data in ODD:
            return
        k = max(self.compressor.target_count(len(x)), selecting)
        fewest, most = math.floor(0.5 * k), math.ceil(2.0 * k)
        assert fewest <= len(indices) <= most, f"{title}: sent {len(indices)} entries, {fewest} to {most} were due"


def memory(title: str, conditions: Conditions) -> float | None:
    """Return the most memory that one step of a case takes beyond what it begins with, as a fraction of the residual.

    None for what is no case, or if the system does not tell. It knows the resident set only to about half a megabyte, so be
    careful with small buckets. Linux only.
    """
    if not _PEAK.exists() or title not in [case.title for case in CASES]:
        return None
    # These make freed memory go back to the system, so that the next step's peak shows it again. A process reads them once,
    # when it starts. It also is a new one so that nothing is left of other cases.
    os.environ.update({"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"})
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (title, conditions)) / (4 * conditions.size)


def _peak(title: str, conditions: Conditions) -> int:
    """Return the peak of this process's resident set during a step, minus the resident set before it, in bytes."""
    torch.set_num_threads(conditions.threads)
    (case,) = [case for case in CASES if case.title == title]
    gradients = Gradients(conditions.size, case.data)
    worker = Worker(case, conditions, gradients)
    if case.cold:
        worker.start()
    gradient = gradients.next()
    gc.collect()
    kernels.pool._spare.clear()
    before = _resident("VmRSS")
    _PEAK.write_text("5", encoding="ascii")
    worker.step(gradient)
    return max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    """Return the resident set in bytes: "VmRSS" is the current one, "VmHWM" the peak since it was reset."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return 1024 * int(found.group(1))
