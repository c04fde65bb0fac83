"""The rows that are timed, one per compressor and kind of gradients. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from horovod_sparse.tools.bench.checks import Check, above, block, draw, everything, exact, own_part, sampled


@dataclass(frozen=True)
class Row:
    """One compressor's step, and how it is timed."""

    name: str
    make: Callable[[float], Compressor]
    check: Check
    """Raises AssertionError if the wrong entries were selected."""
    bars: Mapping[float, float] = field(default_factory=dict)
    """The most units that the row may take, by ratio; see `bar_of`."""
    data: str = "Laplace"
    world: int = 1
    cold: bool = False
    """True if the first step of a new pipeline is timed, and not one of many."""
    receives: bool = False
    """True if writing all ranks' messages is timed, and not making them."""
    warm_steps: int = 25
    """Number of steps before the first that is timed. Thresholds have settled by then."""
    chosen: bool = True
    """True if the command `horovod-sparse bench` times the row."""

    @property
    def title(self) -> str:
        return self.name if self.data == "Laplace" else f"{self.name}, {self.data}"


@dataclass(frozen=True)
class Conditions:
    """The conditions under which a row is timed."""

    size: int
    ratio: float
    threads: int
    backend: str
    kernels: str
    """The variant of the kernels, or "off"."""


BAR_SIZES = (25_000_000, 100_000_000)
SMALL, SMALL_BAR = 1_000_000, 2.2
"""A number of elements that stays in the processor's cache, and the units that a step may take then."""
PORTABLE = 1.5
"""Factor on a bar for kernels that use only the vectors that every processor of its kind has."""


def bar_of(row: Row, conditions: Conditions) -> float | None:
    """Return the units that a row may take under these conditions, or None if there is no such bar."""
    if conditions.threads != 1 or conditions.backend != "torch" or conditions.kernels == "off":
        return None
    bar = row.bars.get(conditions.ratio)
    if bar is None or conditions.size not in (*BAR_SIZES, SMALL):
        return None
    if conditions.size == SMALL:
        bar = max(bar, SMALL_BAR)
    return bar if conditions.kernels in ("avx2", "avx512") else PORTABLE * bar


def _threshold(ratio: float) -> Compressor:
    # This is the first threshold. The worker sets it anew before every step, so that about k entries are above it.
    return Threshold(-math.log(ratio), ratio=ratio, capacity=2.0)


ROWS = (
    *(
        Row(
            f"SIDCo, {distribution}",
            partial(SIDCo, distribution=distribution),
            above(0.5, 2.0),
            {0.001: 1.8, 0.01: 2.2, 0.1: 4.0},
            data,
            chosen=(distribution, data) in {("exponential", "Laplace"), ("gpareto", "heavy tails")},
        )
        for data in ("Laplace", "Gaussian", "heavy tails")
        for distribution in ("exponential", "gamma", "gpareto")
    ),
    Row("TopK", TopK, exact, {0.001: 1.7, 0.01: 2.8, 0.1: 6.0}),
    Row("TopK, first step", TopK, exact, {0.001: 2.5}, cold=True),
    Row("GaussianK", GaussianK, above(0.9, 1.1), {0.001: 1.6, 0.01: 2.2}),
    Row("DGC", DGC, sampled, {0.001: 2.4}),
    Row("RedSync", RedSync, exact, {0.001: 1.7}),
    Row("MiCRO, 8 workers", MiCRO, own_part, {0.001: 1.3, 0.01: 2.2}, world=8),
    Row("RandomK", RandomK, draw, {0.001: 1.2, 0.1: 6.0}),
    Row("RandomBlock", RandomBlock, block, {0.001: 1.1}),
    Row("Threshold", _threshold, above(0.25, 2.0), {0.001: 1.5}, chosen=False),
    Row("NoOp", lambda ratio: NoOp(), everything, {0.001: 3.0}, warm_steps=2, chosen=False),
    Row("decompress, 4 workers", TopK, exact, {0.001: 0.7}, world=4, receives=True),
)

DATA: dict[str, Callable[[np.random.Generator, int], NDArray[Any]]] = {
    "Laplace": lambda rng, size: _signed(rng, rng.standard_exponential(size, np.float32)),
    "Gaussian": lambda rng, size: rng.standard_normal(size, np.float32),
    "heavy tails": lambda rng, size: _signed(
        rng, rng.standard_exponential(size, np.float32) * rng.random(size, np.float32) ** 2
    ),
}


def _signed(rng: np.random.Generator, magnitudes: NDArray[Any]) -> NDArray[Any]:
    magnitudes.view(np.uint32)[...] |= rng.integers(2, size=magnitudes.size, dtype=np.uint32) << 31
    return magnitudes
