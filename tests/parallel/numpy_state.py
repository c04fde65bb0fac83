"""Scenarios: the state of training on NumPy arrays. What is loaded continues bit for bit; what does not fit raises on all."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import numpy as np

from horovod_sparse.numpy import DGC, MiCRO, RandomK, SIDCo, SparseAllreduce, TopK

from .common import MakeCompression, everyone, raised
from .scenario import MPI, scenario

SHAPES = {"weights": (40, 50), "bias": (50,), "half": (30, 40)}


def digest(values: Any) -> str:
    """The bytes of arrays, however deep in mappings, and everything else as text."""
    if isinstance(values, Mapping):
        return str({key: digest(value) for key, value in sorted(values.items())})
    return hashlib.sha256(values.tobytes()).hexdigest() if isinstance(values, np.ndarray) else repr(values)


class Training:
    """Gradient descent with noise, so that weights, residuals and random numbers all matter."""

    def __init__(self, compression: Any) -> None:
        from mpi4py import MPI as mpi  # noqa: N811  Only the ranks of a launch by MPI may load it.

        self.comm = mpi.COMM_WORLD
        self.rng = np.random.default_rng(hvd.rank())
        types = {"half": np.float16, "weights": np.float64}
        self.weights = {name: np.zeros(shape, types.get(name, np.float32)) for name, shape in SHAPES.items()}
        self.allreduce = SparseAllreduce(self.comm, compression)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            noise = {name: self.rng.normal(size=one.shape) for name, one in self.weights.items()}
            gradients = {name: (one + noise[name]).astype(one.dtype) for name, one in self.weights.items()}
            for name, mean in self.allreduce(gradients, learning_rate=0.1).items():
                self.weights[name] -= mean * mean.dtype.type(0.1)

    def save(self) -> bytes:
        return pickle.dumps((self.weights, self.allreduce.state_dict(), self.rng.bit_generator.state))

    def load(self, saved: bytes) -> None:
        weights, state, random = pickle.loads(saved)
        self.allreduce.load_state_dict(state, weights)
        self.weights, self.rng.bit_generator.state = weights, random

    @property
    def digest(self) -> str:
        return digest({**self.weights, "state": self.allreduce.state_dict(), "random": self.rng.bit_generator.state})


@scenario(
    *MPI,
    cases={
        "TopK-rates": (lambda: TopK(0.05, lr_in_residual=True, warmup=None),),
        "SIDCo": (lambda: SIDCo(0.05, granularity=8000, warmup=None),),
        "DGC": (lambda: DGC(0.05, min_numel=0, warmup=None),),
        "RandomK": (lambda: RandomK(0.05, warmup=None),),
        "MiCRO": (lambda: MiCRO(0.05, warmup=None),),
    },
)
def arrays_continue_bit_for_bit(make: MakeCompression) -> None:
    whole = Training(make())
    whole.train(3)
    saved = whole.save()
    resumed = Training(make())
    resumed.load(saved)
    assert resumed.digest == whole.digest
    for training in (whole, resumed):
        training.train(4)
    assert resumed.digest == whole.digest
    assert len(set(everyone(digest(resumed.weights)))) == 1
    # What has been called already goes back as well.
    whole.train(2)
    whole.load(saved)
    whole.train(4)
    assert resumed.digest == whole.digest


@scenario(*MPI)
def a_state_that_does_not_fit_raises_on_every_rank() -> None:
    training, other = Training(TopK(0.05, warmup=None)), Training(TopK(0.05, warmup=None))
    training.train(2)
    state = training.allreduce.state_dict()
    if hvd.rank() == 1:
        other.weights["bias"] = np.zeros(51, np.float32)
    start = other.digest
    message = raised(ValueError, lambda: other.allreduce.load_state_dict(state, other.weights))
    assert "all workers must reduce the same arrays" in message
    assert other.digest == start
