"""All rows that are timed, on three kinds of gradients, and how long each may take. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

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


class Spent(NamedTuple):
    """The seconds of a step, without the collectives."""

    compress: float
    """From the gradient's arrival to the last collective, and the end of the step."""
    write: float
    """After the last collective: all workers' messages become the reduced gradient."""


@dataclass(frozen=True)
class Row:
    """A part of one worker's step."""

    title: str
    make: Callable[[float], Compressor]
    """Returns the compressor with a ratio."""
    world: int = 1
    receives: bool = False
    """True if writing all workers' messages is timed, and not making this worker's own."""
    warm_steps: int = 25
    """Number of steps before the first that is timed. Thresholds have settled by then."""

    def part(self, spent: Spent) -> float:
        return spent.write if self.receives else spent.compress


def _constant(cls: Callable[..., Compressor], **chosen: Any) -> Callable[[float], Compressor]:
    """A compressor with the same ratio in all steps."""
    return partial(cls, warmup=None, **chosen)


ROWS = (
    *(Row(f"SIDCo, {name}", _constant(SIDCo, distribution=name)) for name in ("exponential", "gamma", "gpareto")),
    Row("TopK", _constant(TopK)),
    Row("GaussianK", _constant(GaussianK)),
    Row("DGC", _constant(DGC)),
    Row("RedSync", _constant(RedSync)),
    Row("MiCRO, 8 workers", _constant(MiCRO), world=8),
    Row("RandomK", _constant(RandomK)),
    Row("RandomBlock", _constant(RandomBlock)),
    Row("decompress, 4 workers", _constant(TopK), world=4, receives=True),
)


@dataclass(frozen=True)
class Conditions:
    """The conditions under which rows are timed."""

    size: int
    ratio: float
    threads: int
    backend: str
    kernels: str
    """The variant of the kernels, or "off"."""

    def __str__(self) -> str:
        where = f"{self.backend}, kernels: {self.kernels}, threads: {self.threads}"
        return f"{self.size:,} elements, ratio {self.ratio:g}, {where}"


Draw = Callable[[np.random.Generator, int], NDArray[Any]]
"""Draws the entries of a gradient."""


def laplace(rng: np.random.Generator, size: int) -> NDArray[Any]:
    """Draw entries from the Laplace distribution."""
    entries = rng.standard_exponential(size, np.float32)
    entries.view(np.uint32)[...] |= rng.integers(2, size=size, dtype=np.uint32) << 31
    return entries


BAR_SIZES = (25_000_000, 100_000_000)
SMALL, SMALL_BAR = 1_000_000, 2.2
"""A number of elements that stays in the processor's cache, and the units that a step may take then."""
PORTABLE = 1.5
"""Factor on a bar for kernels that use only the vectors that every processor of its kind has."""


@dataclass(frozen=True)
class Case:
    """A row, on what gradients it is timed, and how long it may take."""

    row: Row
    bars: Mapping[float, float] = field(default_factory=dict)
    """The most units that the row may take, by ratio; see `bar`."""
    data: str = "Laplace"
    cold: bool = False
    """True if the first step of a new worker is timed, and not one of many."""

    @property
    def title(self) -> str:
        """The row's, and what is unlike others."""
        data = "" if self.data == "Laplace" else f", {self.data}"
        return f"{self.row.title}{data}{', first step' if self.cold else ''}"

    def bar(self, conditions: Conditions) -> float | None:
        """The units that the row may take under these conditions, or None if there is no such bar."""
        if conditions.threads != 1 or conditions.backend != "torch" or conditions.kernels == "off":
            return None
        bar = self.bars.get(conditions.ratio)
        if bar is None or conditions.size not in (*BAR_SIZES, SMALL):
            return None
        if conditions.size == SMALL:
            bar = max(bar, SMALL_BAR)
        return bar if conditions.kernels in ("avx2", "avx512") else PORTABLE * bar


def _threshold(ratio: float) -> Compressor:
    # This is the first threshold. A new one is set before every step, so that about k entries are above it.
    return Threshold(-math.log(ratio), ratio=ratio, slack=2.0)


_ROW = {row.title: row for row in ROWS}

CASES = (
    *(
        Case(_ROW[f"SIDCo, {distribution}"], {0.001: 1.8, 0.01: 2.2, 0.1: 4.0}, data)
        for data in ("Laplace", "Gaussian", "heavy tails")
        for distribution in ("exponential", "gamma", "gpareto")
    ),
    Case(_ROW["TopK"], {0.001: 1.7, 0.01: 2.8, 0.1: 6.0}),
    Case(_ROW["TopK"], {0.001: 2.5}, cold=True),
    Case(_ROW["GaussianK"], {0.001: 1.6, 0.01: 2.2}),
    Case(_ROW["DGC"], {0.001: 2.4}),
    Case(_ROW["RedSync"], {0.001: 1.7}),
    Case(_ROW["MiCRO, 8 workers"], {0.001: 1.3, 0.01: 2.2}),
    Case(_ROW["RandomK"], {0.001: 1.2, 0.1: 6.0}),
    Case(_ROW["RandomBlock"], {0.001: 1.1}),
    Case(Row("Threshold", _threshold), {0.001: 1.5}),
    Case(Row("NoOp", lambda ratio: NoOp(), warm_steps=2), {0.001: 3.0}),
    Case(_ROW["decompress, 4 workers"], {0.001: 0.7}),
)


def _heavy_tails(rng: np.random.Generator, size: int) -> NDArray[Any]:
    return laplace(rng, size) * rng.random(size, np.float32) ** 2


DATA: dict[str, Draw] = {
    "Laplace": laplace,
    "Gaussian": lambda rng, size: rng.standard_normal(size, np.float32),
    "heavy tails": _heavy_tails,
}
