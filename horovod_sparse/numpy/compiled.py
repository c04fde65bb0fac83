"""The array operations with compiled kernels, on the memory of NumPy arrays. Operations without a kernel are those of NumPy."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from horovod_sparse import kernels
from horovod_sparse.estimation.search import largest_candidates
from horovod_sparse.kernels import memory_of, name_of
from horovod_sparse.kernels.tracked import HostOps, TrackedMemory
from horovod_sparse.numpy.ops import NumpyOps
from horovod_sparse.ops.protocol import Moments, Moving, Part, Selection, Sums, Tracked

Array = NDArray[Any]


def host_ops(threads: int | None = None) -> NumpyOps:
    """Return the array operations for arrays on the CPU: compiled ones if there are any.

    Args:
        threads: the number of threads that kernels may use; None for the value of OMP_NUM_THREADS, or else one.
    """
    if threads is None:
        said = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(said) if said.isdigit() and int(said) > 0 else 1
    return CompiledOps(threads) if kernels.available() else NumpyOps()


class CompiledOps(NumpyOps):
    """Implements `horovod_sparse.ops.protocol.Ops` on `numpy.ndarray`. Selects the same entries as `NumpyOps`.

    Args:
        threads: the number of threads that one operation may use.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads

    # --- what `kernels.tracked.HostOps` needs ---

    def threads(self) -> int:
        return self._threads

    def memory(self, array: Array) -> kernels.Memory:
        return memory_of(array)

    def array(self, host: Array) -> Array:
        return host

    def gradients(self, parts: Sequence[Part]) -> tuple[list[kernels.Gradient], object] | None:
        flats = [_contiguous(gradient) for _, gradient in parts]
        if not all(kernels.supports(name_of(flat.dtype)) for flat in flats):
            return None
        return [_given(first, flat) for (first, _), flat in zip(parts, flats, strict=True)], flats

    # --- operations ---

    def tracked(self, x: Array) -> Tracked:
        if x.flags.c_contiguous and x.flags.aligned and x.flags.writeable:
            return cast(Tracked, TrackedMemory(cast(HostOps, self), x))
        return super().tracked(x)

    def accumulate(self, buffer: Array, gradients: Sequence[Part], moving: Moving | None = None) -> list[int]:
        given = self.gradients(gradients)
        if given is None:
            return super().accumulate(buffer, gradients, moving)
        how = None if moving is None else (memory_of(moving.velocity), moving.momentum, moving.nesterov)
        return kernels.accumulate(memory_of(buffer), given[0], self._threads, how)

    def measure(self, x: Array) -> Sums:
        return kernels.measure(memory_of(_contiguous(x)), self._threads)

    def all_finite(self, array: Array) -> bool:
        flat = _flat(array)
        return super().all_finite(array) if flat is None else kernels.all_finite(memory_of(flat), self._threads)

    def moments(self, x: Array, threshold: float, *, with_log: bool = False) -> Moments:
        return kernels.moments(memory_of(_contiguous(x)), threshold, with_log, self._threads)

    def counts(self, x: Array, thresholds: list[float]) -> list[int]:
        return kernels.counts(memory_of(_contiguous(x)), thresholds, self._threads)

    def max_abs(self, x: Array) -> float:
        return self.measure(x).largest

    def norm(self, x: Array) -> float:
        return math.sqrt(self.measure(x).squares)

    def select_above(self, x: Array, threshold: float, capacity: int) -> Selection:
        x = _contiguous(x)
        indices = kernels.select_above(memory_of(x), threshold, capacity, self._threads)
        found = indices.size
        if found > capacity:
            indices = indices[self.select_largest(x[indices], capacity).indices]
        return Selection(indices, found)

    def select_largest(self, x: Array, count: int) -> Selection:
        few = largest_candidates(self, x, count)
        if few is None:
            return super().select_largest(x, count)
        among = super().select_largest(x[few], count)
        return among._replace(indices=few[among.indices])

    def union(self, gathered: Array, world: int, header: int, numel: int) -> Array | None:
        return kernels.union(memory_of(_contiguous(gathered)), world, header, numel)

    def distinct(self, draw: Callable[[int], Array], numel: int, k: int) -> Array:
        return kernels.distinct(draw, numel, k)

    def take(self, x: Array, indices: Array) -> Array:
        values = np.empty(indices.size, np.float32)
        kernels.take(memory_of(x), memory_of(_contiguous(indices)), memory_of(values))
        return values

    def scatter_add(self, target: Array, indices: Array, values: Array) -> None:
        kernels.scatter_add(memory_of(target), memory_of(_contiguous(indices)), memory_of(_contiguous(values)))

    def assembler(self, messages: Array, used: list[int], divisor: float) -> Callable[[Sequence[Part]], None]:
        assemble = kernels.assembler(memory_of(_contiguous(messages)), used, divisor)
        return lambda targets: assemble([kernels.target_of(memory_of(target), first) for first, target in targets])

    def _message(self, count: int, dtype: np.dtype[Any]) -> Array:
        return kernels.pool.lend(count, name_of(dtype))

    def send(self, x: Array, indices: Array, capacity: int) -> Array:
        message = np.empty((capacity, 2), np.int32)
        kernels.send(memory_of(x), memory_of(_contiguous(indices)), memory_of(message))
        return message

    def pack(self, indices: Array, values: Array, capacity: int) -> Array:
        message = np.empty((capacity, 2), np.int32)
        kernels.pack(memory_of(_contiguous(indices)), memory_of(_contiguous(values)), memory_of(message))
        return message

    def rows_in_use(self, indices: Array, world: int, numel: int) -> list[int | None]:
        first = kernels.Memory(indices.ctypes.data, name_of(indices.dtype), indices.size, indices)
        return kernels.rows_in_use(first, indices.strides[0] // indices.itemsize, world, numel)

    def unpack(self, message: Array, used: int) -> tuple[Array, Array]:
        indices, values = np.empty(used, np.int64), np.empty(used, np.float32)
        kernels.unpack(memory_of(_contiguous(message)), used, memory_of(indices), memory_of(values))
        return indices, values


def _contiguous(array: Array) -> Array:
    return np.require(array, requirements=("C", "A"))


def _given(first: int, gradient: Array) -> kernels.Gradient:
    memory = memory_of(gradient)
    return kernels.Gradient(memory.address, kernels.code_of(memory.dtype), first, memory.numel)


def _flat(gradient: Array) -> Array | None:
    """Return the gradient as a contiguous array, or None if the kernels do not support its type."""
    return _contiguous(gradient) if kernels.supports(name_of(gradient.dtype)) else None
