"""The array operations with compiled kernels, on NumPy arrays. Tested by tests/kernels/test_ops.py."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse import kernels
from horovod_sparse.kernels.memory import Memory, type_of
from horovod_sparse.kernels.ops import KernelOps
from horovod_sparse.numpy.ops import NumpyOps

Array = NDArray[Any]


def host_ops(threads: int | None = None) -> NumpyOps:
    """Return the array operations for the CPU, compiled if possible, on so many threads (None: OMP_NUM_THREADS, or one)."""
    if threads is None:
        said = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(said) if said.isdigit() and int(said) > 0 else 1
    return CompiledOps(threads) if kernels.available() else NumpyOps()


class CompiledOps(KernelOps, NumpyOps):
    """Implements `Ops` on `numpy.ndarray`, with the results of `NumpyOps`, on so many threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def threads(self) -> int:
        return self._threads

    def memory(self, array: Array) -> Memory | None:
        number = type_of(array.dtype)
        if number is None:
            return None
        flags = array.flags
        kept = flags.c_contiguous and flags.aligned
        if not kept:
            array = np.require(array, requirements=("C", "A"))
        pointer = kernels.ffi.from_buffer("void *", array)
        return Memory(pointer, number, array.size, array, kept and flags.writeable)

    def array(self, host: Array) -> Array:
        return host
