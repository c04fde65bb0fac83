"""What is timed, and under which conditions. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.dgc import DGC
from horovod_sparse.compressors.gaussiank import GaussianK
from horovod_sparse.compressors.micro import MiCRO
from horovod_sparse.compressors.randomblock import RandomBlock
from horovod_sparse.compressors.randomk import RandomK
from horovod_sparse.compressors.redsync import RedSync
from horovod_sparse.compressors.sidco import SIDCo
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


ROWS = (
    *(Row(f"SIDCo, {name}", partial(SIDCo, distribution=name)) for name in ("exponential", "gamma", "gpareto")),
    Row("TopK", TopK),
    Row("GaussianK", GaussianK),
    Row("DGC", DGC),
    Row("RedSync", RedSync),
    Row("MiCRO, 8 workers", MiCRO, world=8),
    Row("RandomK", RandomK),
    Row("RandomBlock", RandomBlock),
    Row("decompress, 4 workers", TopK, world=4, receives=True),
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
