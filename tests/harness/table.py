"""The tables that the laws run over: a new algorithm is one row, a new backend is one row."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from horovod_sparse import compressors
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.numpy.compiled import host_ops
from horovod_sparse.public import MomentumCorrection, Pairs, Union
from tests.harness.backend import ORACLE, Backend


def _torch_backends() -> list[Backend]:
    import torch

    from horovod_sparse.torch.compiled import tensor_ops
    from horovod_sparse.torch.ops import TorchOps

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(array))

    def numpy(tensor: torch.Tensor) -> np.ndarray:
        return tensor.numpy()

    return [Backend("torch", tensor_ops(), tensor, numpy), Backend("torch-operations", TorchOps(), tensor, numpy)]


def _tensorflow_backends() -> list[Backend]:
    import tensorflow as tf

    def memory_of_tensor(array: np.ndarray) -> np.ndarray:
        return np.asarray(memoryview(tf.constant(array)))

    # Gradients and messages are the memory of tensors, which must not be written to.
    return [Backend("tensorflow", host_ops(2), memory_of_tensor, np.asarray)]


SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
"""Whether `sanitize.py` runs this. TensorFlow cannot be imported then."""

BACKENDS = [
    ORACLE,
    Backend("numpy-compiled", host_ops(2), np.array, np.asarray),
    # Those frameworks that are installed: the package is to work with one alone, and with none.
    *(_torch_backends() if find_spec("torch") else []),
    *(_tensorflow_backends() if find_spec("tensorflow") and not SANITIZED else []),
]


WITH_OPERATIONS = [backend for backend in BACKENDS if backend.name != "tensorflow"]
"""Those with array operations of their own, whose arrays can be written to."""
on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


@dataclass(frozen=True)
class Row:
    name: str
    cls: type[Compressor]
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    arguments: Callable[[Any], dict[str, Any]] = lambda ratio: {"ratio": ratio}
    """What it is made of where this ratio is asked for."""
    band: tuple[float, float] = (1.0, 1.0)
    """Least and most achieved/asked count, averaged over a run with error feedback on Laplace gradients."""
    ratios: tuple[float, ...] = (0.1, 0.01)
    largest: bool = True
    """Sends the entries of largest magnitude of what it looks at."""
    follows_order: bool = False
    """Its choice depends on where entries stand, so it does not follow a permutation."""
    follows_scale: bool = False
    """Its choice depends on the scale: the threshold is the user's."""
    robust: bool = True
    """Its count stays within the band if one entry is huge beside all others."""
    momentum: bool = False
    """What is selected from is not gradient plus residual."""
    workers_differ: bool = False
    """Workers with the same data choose differently, by design."""

    def make(self, ratio: Any, **settings: Any) -> Compressor:
        """With this ratio from the first step on, unless `settings` have a warm-up."""
        made: Compressor = self.cls(**{"warmup": None, **self.arguments(ratio), **self.settings, **settings})
        return made

    def __str__(self) -> str:
        return self.name


def _threshold(ratio: Any) -> dict[str, Any]:
    # Entries of Laplace gradients exceed it with about the ratio's chance; at ratio 1 all do that are not zero.
    return {"threshold": -np.log(ratio if isinstance(ratio, float) else ratio.final), "ratio": ratio}


_RANDOM: dict[str, Any] = {"largest": False, "follows_order": True}

COMPRESSORS = [
    Row("noop", compressors.NoOp, arguments=lambda ratio: {}, ratios=(1.0,)),
    Row("topk", compressors.TopK),
    Row("topk-union", compressors.TopK, {"exchange": Union()}),
    Row("topk-packed", compressors.TopK, {"exchange": Pairs("packed")}),
    *(
        Row(
            f"sidco-{distribution}-{adapt}",
            compressors.SIDCo,
            {"distribution": distribution, "adapt": adapt},
            band=band,
            robust=adapt != "paper",
        )
        for distribution, paper in (("exponential", (1.0, 1.2)), ("gamma", (0.75, 1.3)), ("gpareto", (0.8, 1.25)))
        for adapt, band in (("paper", paper), ("robust", (0.95, 1.05)))
    ),
    Row("sidco-one-stage", compressors.SIDCo, {"stages": 1}, band=(0.5, 1.25)),
    Row("gaussiank", compressors.GaussianK, band=(0.9, 1.1)),
    Row("gaussiank-paper", compressors.GaussianK, {"refine": "paper"}, band=(0.9, 4.0), robust=False),
    Row("dgc", compressors.DGC, band=(0.9, 1.1), follows_order=True),
    Row(
        "dgc-momentum",
        compressors.DGC,
        {"momentum": 0.9},
        band=(0.9, 1.1),
        follows_order=True,
        momentum=True,
    ),
    Row(
        "dgc-unmasked",
        compressors.DGC,
        {"momentum": MomentumCorrection(0.9, masking=False)},
        band=(0.9, 1.1),
        follows_order=True,
        momentum=True,
    ),
    Row("redsync", compressors.RedSync),
    Row("micro", compressors.MiCRO, band=(0.95, 1.25), workers_differ=True),
    Row("micro-paper", compressors.MiCRO, {"scaling": "paper"}, band=(0.85, 2.0), workers_differ=True, robust=False),
    Row("randomk", compressors.RandomK, **_RANDOM),
    Row("randomk-own", compressors.RandomK, {"exchange": Pairs()}, **_RANDOM, workers_differ=True),
    Row("randomblock", compressors.RandomBlock, **_RANDOM),
    Row("randomblock-own", compressors.RandomBlock, {"exchange": Pairs()}, **_RANDOM, workers_differ=True),
    Row("threshold", compressors.Threshold, arguments=_threshold, band=(1.6, 6.3), follows_scale=True),
]


def own_row(text: str) -> Row:
    """The row `module:ROW`, or that of the class `module:Class`."""
    module, _, name = text.partition(":")
    found = getattr(import_module(module), name)
    if isinstance(found, Row):
        return found
    if not issubclass(found, Compressor):
        raise TypeError(f"{name} must be a subclass of horovod_sparse.compressors.base.Compressor, or a Row")
    return Row(name, found)


def gradients(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """One synthetic gradient, of the `KINDS` that algorithms are judged on or of the `ODD` ones."""

    def signs() -> np.ndarray:
        return rng.choice([-1.0, 1.0], size=size)

    samples = {
        "laplace": lambda: rng.laplace(size=size),
        "gaussian": lambda: rng.normal(size=size),
        "gamma": lambda: rng.gamma(0.5, size=size) * rng.choice([-1.0, 1.0], size=size),
        "student": lambda: rng.standard_t(4, size=size),
        "pareto": lambda: (rng.uniform(size=size) ** -0.3 - 1.0) / 0.3 * rng.choice([-1.0, 1.0], size=size),
        "mostly-zero": lambda: np.where(rng.uniform(size=size) < 0.01, rng.laplace(size=size), 0.0),
        "two-scales": lambda: rng.laplace(size=size) * np.where(np.arange(size) < size // 10, 10.0, 0.1),
        "signs": signs,
        "noisy-signs": lambda: signs() * rng.normal(1.0, 0.05, size),
        "two-humps": lambda: signs() * rng.normal(1.0, 0.05, size) * rng.choice([1.0, 0.01], size=size),
        "bfloat16": lambda: (rng.normal(size=size).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32),
        "ramp": lambda: np.linspace(0.0, 1.0, size),
        "denormal": lambda: rng.normal(size=size) * 1e-40,
        "one-entry": lambda: np.arange(size) == size // 2,
        "equal": lambda: np.ones(size),
    }
    return samples[kind]().astype(np.float32)


def gradients_of(shapes: Mapping[str, Sequence[int]], rng: np.random.Generator) -> dict[str, Any]:
    """Laplace gradients of parameters with these shapes."""
    return {name: gradients("laplace", math.prod(shape), rng).reshape(shape) for name, shape in shapes.items()}


KINDS = ("laplace", "gaussian", "gamma", "student", "pareto", "mostly-zero", "two-scales")
# On these too a selection is exact, and takes about as long.
ODD = ("signs", "noisy-signs", "two-humps", "bfloat16", "ramp", "denormal", "one-entry", "equal")


DEGENERATE: dict[str, np.ndarray] = {
    "zeros": np.zeros(500, np.float32),
    "negative-zeros": np.full(500, -0.0, np.float32),
    "constant": np.full(500, -3.0, np.float32),
    "one-hot": np.eye(1, 500, 123, dtype=np.float32)[0] * 7,
    "two-hot": np.eye(1, 500, 123, dtype=np.float32)[0] + np.eye(1, 500, 3, dtype=np.float32)[0] * 2,
    "one-element": np.array([2.5], np.float32),
    "two-elements": np.array([-2.5, 1.0], np.float32),
    "huge": np.linspace(-3e38, 3e38, 500, dtype=np.float32),
    "denormal": (np.arange(500) * 1e-45).astype(np.float32),
    "all-smallest": np.full(500, 1e-45, np.float32),
    "plus-minus-one": np.where(np.arange(500) % 2, 1.0, -1.0).astype(np.float32),
    "ties": np.repeat(np.arange(50), 10).astype(np.float32),
    "one-outlier": np.r_[np.full(499, 1e-3), 1e6].astype(np.float32),
    "wide-range": np.geomspace(1e-38, 1e38, 500).astype(np.float32),
}


SCALES_WITHOUT_SQUARES = (1e-170, 1e160)
"""Of float64 gradients: their squares underflow to 0, or overflow to infinity."""
