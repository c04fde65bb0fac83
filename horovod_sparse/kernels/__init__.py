"""The compiled kernels, if they are there. Imports no framework.

They work on `Memory`: an address, a type and a number of elements. An adapter makes one of its contiguous CPU arrays and keeps
the array alive during the call. Without a compiler at installation, or with HOROVOD_SPARSE_KERNELS=0, there are none, and
the adapters use their framework's operations.
"""

from __future__ import annotations

import math
import os
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.ops import Sums

_native: Any
try:
    _native = import_module("horovod_sparse.kernels._native")
except ImportError:
    _native = None

_SPARE = 16
_TYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
MOST_THRESHOLDS = 16


def available() -> bool:
    """Whether the kernels were compiled and are not turned off."""
    return _native is not None and os.environ.get("HOROVOD_SPARSE_KERNELS", "1") != "0"


class Memory(NamedTuple):
    """Contiguous elements of a CPU array."""

    address: int
    dtype: str
    """"float32" or "float64", gradients also "bfloat16" or "float16"."""
    numel: int


def memory_of(array: NDArray[Any]) -> Memory:
    """Of a contiguous array."""
    return Memory(array.__array_interface__["data"][0], str(array.dtype), array.size)


def supports(dtype: str) -> bool:
    """Whether gradients of this type can be taken."""
    return dtype in _TYPES


def accumulate(residual: Memory, gradient: Memory, cut: float, threads: int) -> Sums:
    """residual += gradient where that is finite; sums of the new residual."""
    sums = _native.ffi.new("hs_sums *")
    _native.lib.hs_accumulate(*_mutable(residual), *_constant(gradient), residual.numel, _bound(cut), threads, sums)
    return _sums(sums)


def accumulate_velocity(
    residual: Memory, velocity: Memory, gradient: Memory, momentum: float, nesterov: bool, cut: float, threads: int
) -> Sums:
    """Take a gradient into velocity and residual; sums of the new residual."""
    sums = _native.ffi.new("hs_sums *")
    _native.lib.hs_accumulate_velocity(
        _pointer(residual),
        *_mutable(velocity),
        *_constant(gradient),
        residual.numel,
        momentum,
        nesterov,
        _bound(cut),
        threads,
        sums,
    )
    return _sums(sums)


def measure(x: Memory, cut: float, with_logs: bool, threads: int) -> Sums:
    """Sums of x."""
    sums = _native.ffi.new("hs_sums *")
    _native.lib.hs_measure(*_mutable(x), x.numel, _bound(cut), with_logs, threads, sums)
    return _sums(sums, with_logs)


def counts(x: Memory, thresholds: list[float], threads: int) -> list[int]:
    """How many entries are above each threshold; at most 16 thresholds."""
    found = _native.ffi.new("int64_t[]", len(thresholds))
    _native.lib.hs_counts(*_mutable(x), x.numel, thresholds, len(thresholds), threads, found)
    return list(found)


def all_finite(x: Memory, threads: int) -> bool:
    """Whether all entries are finite."""
    return bool(_native.lib.hs_all_finite(*_mutable(x), x.numel, threads))


def select_above(x: Memory, threshold: float, capacity: int, threads: int) -> tuple[NDArray[np.int64], int]:
    """Indices of the first `capacity` entries above the threshold, and how many are above it."""
    indices = np.empty(capacity, np.int64)
    pointer = _native.ffi.cast("int64_t *", _native.ffi.from_buffer(indices))
    found = int(_native.lib.hs_select_above(*_mutable(x), x.numel, threshold, pointer, capacity, threads))
    return indices[: min(found, capacity)], found


def select_all_above(x: Memory, threshold: float, expected: int, threads: int) -> tuple[NDArray[np.int64], int]:
    """Indices of all entries above the threshold, and their number; mostly one pass, if a few times `expected` or fewer."""
    # Memory that is not written to costs nothing, a second pass does.
    indices, found = select_above(x, threshold, min(_SPARE * expected, x.numel), threads)
    if found > len(indices):
        indices, found = select_above(x, threshold, found, threads)
    return indices, found


def take(x: Memory, indices: Memory, values: Memory) -> None:
    """values = x[indices] rounded to float32, which is subtracted there. Indices are in range."""
    lib, cast = _native.lib, _native.ffi.cast
    lib.hs_take(*_mutable(x), cast("int64_t *", indices.address), indices.numel, cast("float *", values.address))


def scatter_add(target: Memory, indices: Memory, values: Memory) -> bool:
    """target[indices] += values; False, and nothing is changed, if an index is out of range."""
    pointer = _native.ffi.cast("int64_t *", indices.address)
    return bool(_native.lib.hs_scatter_add(*_mutable(target), target.numel, pointer, *_constant(values), indices.numel))


def _pointer(memory: Memory) -> Any:
    return _native.ffi.cast("void *", memory.address)


def _mutable(memory: Memory) -> tuple[Any, int]:
    return _pointer(memory), _TYPES[memory.dtype]


_constant = _mutable


def _bound(cut: float) -> float:
    return math.inf if math.isnan(cut) else cut


def _sums(sums: Any, with_logs: bool = False) -> Sums:
    return Sums(
        count=sums.count,
        total=sums.total,
        squares=sums.squares,
        largest=sums.largest,
        tail_count=sums.tail_count,
        tail_total=sums.tail_total,
        tail_squares=sums.tail_squares,
        tail_logs=sums.tail_logs if with_logs else math.nan,
        not_finite=sums.not_finite,
    )
