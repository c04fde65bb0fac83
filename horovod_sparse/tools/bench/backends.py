"""The frameworks' arrays, the unit, and what compressors are compared with. Needs PyTorch and Horovod for PyTorch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from horovod.torch.compression import Compression
from numpy.typing import NDArray
from torch import Tensor

from horovod_sparse.numpy.compiled import host_ops
from horovod_sparse.tools.bench.worker import Backend, Gradients
from horovod_sparse.torch.ops import TorchOps


def make_backend(name: str, threads: int) -> Backend:
    """Return the backend "torch" or "numpy"."""
    torch.set_num_threads(threads)
    if name == "numpy":
        return Backend(host_ops(threads), np.zeros(1, np.float32), _same, np.concatenate)
    return Backend(TorchOps(), torch.zeros(1), _memory_of, torch.cat)


def _same(array: NDArray[Any]) -> NDArray[Any]:
    return array


def _memory_of(tensor: Tensor) -> NDArray[Any]:
    memory: NDArray[Any] = tensor.numpy()
    return memory


class Unit:
    """The least work of a selection with error feedback: `residual.add_(gradient)`, done by PyTorch for every backend."""

    def __init__(self, backend: Backend, gradients: Gradients, size: int) -> None:
        self._host = backend.host
        self._gradients = gradients
        self._residual = torch.zeros(size)
        self._residual.fill_(0.0)

    def seconds(self) -> float:
        gradient = torch.from_numpy(self._host(self._gradients.next("Laplace")))
        begun = time.perf_counter()
        self._residual.add_(gradient)
        return time.perf_counter() - begun


def comparisons(ratio: float, size: int) -> dict[str, Callable[[Tensor], object]]:
    """Return other operations on a gradient to compare with, by title."""
    k = max(1, math.floor(round(ratio * size, 6)))
    residual = torch.zeros(size)
    residual.fill_(0.0)
    return {
        "torch.topk(x.abs(), k) alone": lambda x: torch.topk(x.abs(), k),
        "SIDCo in plain torch operations": lambda x: plain_sidco(residual, x, ratio),
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
