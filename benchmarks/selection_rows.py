"""All rows that are timed, on three kinds of gradients, and how long each may take. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse import kernels
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.dgc import DGC
from horovod_sparse.compressors.gaussiank import GaussianK
from horovod_sparse.compressors.micro import MiCRO
from horovod_sparse.compressors.noop import NoOp
from horovod_sparse.compressors.randomblock import RandomBlock
from horovod_sparse.compressors.randomk import RandomK
from horovod_sparse.compressors.redsync import RedSync
from horovod_sparse.compressors.sidco import SIDCo
from horovod_sparse.compressors.threshold import Threshold
from horovod_sparse.compressors.topk import TopK

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
    backend: str

    def __str__(self) -> str:
        where = f"{self.backend}, kernels: {kernels.variant()}, threads: {self.threads}"
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
    return Threshold(-math.log(ratio), ratio=ratio, slack=2.0)


CASES = (
    *(
        Case(f"SIDCo, {fit}", _constant(SIDCo, distribution=fit), {0.001: 1.8, 0.01: 2.2, 0.1: 4.0}, data)
        for data in ("Laplace", "Gaussian", "heavy tails")
        for fit in ("exponential", "gamma", "gpareto")
    ),
    Case("TopK", _constant(TopK), {0.001: 1.7, 0.01: 2.8, 0.1: 6.0}),
    Case("TopK", _constant(TopK), {0.001: 2.5}, cold=True),
    Case("GaussianK", _constant(GaussianK), {0.001: 1.6, 0.01: 2.2}),
    Case("DGC", _constant(DGC), {0.001: 2.4}),
    Case("RedSync", _constant(RedSync), {0.001: 1.7}),
    Case("MiCRO, 8 workers", _constant(MiCRO), {0.001: 1.3, 0.01: 2.2}, world=8),
    Case("RandomK", _constant(RandomK), {0.001: 1.2, 0.1: 6.0}),
    Case("RandomBlock", _constant(RandomBlock), {0.001: 1.1}),
    Case("Threshold", _threshold, {0.001: 1.5}),
    Case("NoOp", lambda ratio: NoOp(), {0.001: 3.0}, warm_steps=2),
    Case("decompress, 4 workers", _constant(TopK), {0.001: 0.7}, world=4, receives=True),
)


def laplace(rng: np.random.Generator, size: int) -> NDArray[Any]:
    """Draw entries from the Laplace distribution."""
    entries = rng.standard_exponential(size, np.float32)
    entries.view(np.uint32)[...] |= rng.integers(2, size=size, dtype=np.uint32) << 31
    return entries


DATA: dict[str, Callable[[np.random.Generator, int], NDArray[Any]]] = {
    "Laplace": laplace,
    "Gaussian": lambda rng, size: rng.standard_normal(size, np.float32),
    "heavy tails": lambda rng, size: laplace(rng, size) * rng.random(size, np.float32) ** 2,
}
"""What draws the entries of a gradient."""
