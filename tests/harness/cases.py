"""What a life of some workers is made of: settings, gradients, and the steps that they make (`tests/core/test_machine.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.momentum import MomentumCorrection
from tests.harness.stairs import Halving
from tests.harness.table import BACKENDS, COMPRESSORS, Backend, Row

SHAPES = {"kernel": (5, 8), "embedding": (30,), "scale": (1,), "head": (9,)}
"""Parameters in buckets: two buckets of float32 with granularity `BUCKET_BYTES`, and one has a single entry with "layer"."""
DENSE = "bias"
SIZE_OF_DENSE = 3
NAMES = (*SHAPES, DENSE)
BUCKET_BYTES = 200

Array = np.ndarray


def size_of(name: str) -> int:
    return SIZE_OF_DENSE if name == DENSE else math.prod(SHAPES[name])


@dataclass(frozen=True)
class Case:
    """What stays the same for the whole life of some workers."""

    row: Row
    ratio: Any
    backend: Backend
    dtype: str
    """Type of the gradients."""
    residual_dtype: str
    averages: bool
    settings: dict[str, Any] = field(hash=False)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How Hypothesis shows it."""
        printer.text(str(self))

    def __str__(self) -> str:
        types = f"{self.dtype} into {self.residual_dtype}"
        return f"Case({self.row}, {self.ratio}, {self.backend}, {types}, averages={self.averages}, {self.settings})"

    def compressor(self, granularity: str | int) -> Compressor:
        return self.row.make(self.ratio, granularity=granularity, **self.settings)


@dataclass(frozen=True)
class Step:
    """The gradients of a step, and the order in which things happen."""

    gradients: list[dict[str, Array | None]]
    """Every rank's, by parameter; None where there is none."""
    rates: dict[str, float]
    order: list[int]
    """Order of the buckets; those of a world with other buckets follow."""
    names: list[str]
    """Order of the parameters within a bucket."""
    together: bool
    """Whether the gradients of a bucket are given to it at once."""
    eager: bool
    """Whether a bucket is exchanged before the next one's gradients arrive."""


GRANULARITIES = ("layer", BUCKET_BYTES, "model")
LAWFUL = [backend for backend in BACKENDS if backend.name.startswith("numpy")]
KINDS = ("laplace", "zeros", "ties", "few", "constant", "small", "huge")
WILD = ("small", "huge")
"""Kinds whose numbers a power of two may bring out of the range of their type."""
MOST_PASSES = 3
MOST_SCALE = {"float16": 2.0**4, "float32": 2.0**20, "float64": 2.0**20}

seeds = st.integers(0, 2**16)
steps = st.lists(seeds, max_size=3)
"""The seeds of ordinary steps."""
worlds = st.integers(1, 3)
places = st.tuples(st.integers(0, 2), st.sampled_from(NAMES))
"""A rank, which is that of no worker in a smaller world, and a parameter."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(list(dict.fromkeys(row.cls for row in COMPRESSORS))))
    row: Row = draw(st.sampled_from([row for row in COMPRESSORS if row.cls is family]))
    momentum = st.builds(MomentumCorrection, st.sampled_from((0.0, 0.5, 0.9)), st.booleans())
    options: dict[str, Any] = {} if row.momentum else {"momentum": draw(st.none() | momentum)}
    dtype = draw(st.sampled_from(("float32", "float16", "float64")))
    ratio = draw(st.sampled_from((0.1, 0.02, 0.5, 1.0, Halving(0.5, 0.1, 2))))
    return Case(
        row=row,
        ratio=ratio,
        backend=draw(st.sampled_from(LAWFUL)),
        dtype=dtype,
        residual_dtype="float64" if dtype == "float64" else "float32",
        averages=draw(st.booleans()),
        settings=options
        | {
            "warmup": draw(st.sampled_from((None, None, 1.0, 2.0))) if isinstance(ratio, float) else None,
            "lr_in_residual": draw(st.booleans()),
            "slack": draw(st.sampled_from((None, 1.0))),
        },
    )


def entries(kind: str, size: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """A gradient. Those of half precision stay within its range when they are scaled."""
    laplace = rng.laplace(size=size)
    drawn = {
        "laplace": lambda: np.round(laplace * 256) / 256 if dtype == "float16" else laplace,
        "zeros": lambda: np.zeros(size),
        "ties": lambda: rng.integers(-3, 4, size),
        "few": lambda: np.where(rng.uniform(size=size) < 0.1, rng.integers(-9, 9, size), 0),
        "constant": lambda: np.full(size, 0.75),
        "small": lambda: rng.integers(-9, 9, size) * (6e-8 if dtype == "float16" else 1.5e-45),
        "huge": lambda: rng.uniform(-1.0, 1.0, size) * (6e4 if dtype == "float16" else 3e38),
    }
    return np.asarray(drawn[kind]()).astype(dtype)
