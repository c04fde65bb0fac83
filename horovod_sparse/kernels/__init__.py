"""The compiled kernels, if they are there. Imports no framework.

They work on `Memory`: an address, a type and a number of elements, which an adapter makes of its contiguous CPU arrays.
Without a compiler at installation, or with HOROVOD_SPARSE_KERNELS=0, there are none, and the adapters use their framework's
operations.
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
_WIDE = {"float32": 0, "float64": 1}
_TYPES = {**_WIDE, "bfloat16": 2, "float16": 3}
_MOST_THRESHOLDS = 16


def compiled() -> bool:
    """Whether the kernels were compiled."""
    return _native is not None


def available() -> bool:
    """Whether the kernels were compiled and are not turned off."""
    return compiled() and os.environ.get("HOROVOD_SPARSE_KERNELS", "1") != "0"


class Memory(NamedTuple):
    """Contiguous elements of a CPU array."""

    address: int
    dtype: str
    """"float32" or "float64", gradients also "bfloat16" or "float16"; indices are "int64"."""
    numel: int
    owner: object
    """The array, which must live as long as its memory is used."""


def memory_of(array: NDArray[Any]) -> Memory:
    """Of a contiguous array."""
    assert array.flags.c_contiguous and array.flags.aligned
    return Memory(array.__array_interface__["data"][0], str(array.dtype), array.size, array)


def supports(dtype: str) -> bool:
    """Whether gradients of this type can be taken."""
    return dtype in _TYPES


def accumulate(residual: Memory, gradient: Memory, cut: float, threads: int) -> Sums:
    """residual += gradient where that is finite; sums of the new residual."""
    assert residual.numel == gradient.numel
    sums = _native.ffi.new("hs_sums *")
    _native.lib.hs_accumulate(*_wide(residual), *_any(gradient), residual.numel, cut, threads, sums)
    return _sums(sums)


def accumulate_velocity(
    residual: Memory, velocity: Memory, gradient: Memory, momentum: float, nesterov: bool, cut: float, threads: int
) -> Sums:
    """Take a gradient into velocity and residual; sums of the new residual."""
    assert residual.numel == velocity.numel == gradient.numel and residual.dtype == velocity.dtype
    sums = _native.ffi.new("hs_sums *")
    how = momentum, nesterov, cut, threads
    _native.lib.hs_accumulate_velocity(
        _wide(residual)[0], *_wide(velocity), *_any(gradient), residual.numel, *how, sums
    )
    return _sums(sums)


def measure(x: Memory, cut: float, with_logs: bool, threads: int) -> Sums:
    """Sums of x. The cut is not negative."""
    sums = _native.ffi.new("hs_sums *")
    _native.lib.hs_measure(*_wide(x), x.numel, cut, with_logs, threads, sums)
    return _sums(sums, with_logs)


def counts(x: Memory, thresholds: list[float], threads: int) -> list[int]:
    """How many entries are above each threshold."""
    found: list[int] = []
    for start in range(0, len(thresholds), _MOST_THRESHOLDS):
        some = thresholds[start : start + _MOST_THRESHOLDS]
        numbers = _native.ffi.new("int64_t[]", len(some))
        _native.lib.hs_counts(*_wide(x), x.numel, some, len(some), threads, numbers)
        found.extend(numbers)
    return found


def all_finite(x: Memory, threads: int) -> bool:
    """Whether all entries are finite."""
    return bool(_native.lib.hs_all_finite(*_any(x), x.numel, threads))


def select_above(x: Memory, threshold: float, capacity: int, threads: int) -> tuple[NDArray[np.int64], int]:
    """Indices of the first `capacity` entries above the threshold, and how many are above it."""
    indices = np.empty(capacity, np.int64)
    pointer = _indices(memory_of(indices))
    found = int(_native.lib.hs_select_above(*_wide(x), x.numel, threshold, pointer, capacity, threads))
    return indices[: min(found, capacity)], found


def select_all_above(x: Memory, threshold: float, expected: int, threads: int) -> tuple[NDArray[np.int64], int]:
    """Indices of all entries above the threshold, and their number; mostly one pass, if a few times `expected` or fewer."""
    # Memory that is not written to costs nothing, a second pass does.
    indices, found = select_above(x, threshold, min(_SPARE * expected, x.numel), threads)
    if found > len(indices):
        indices, found = select_above(x, threshold, found, threads)
    return indices, found


def take(x: Memory, indices: Memory, values: Memory) -> None:
    """values = x[indices] rounded to float32, which is subtracted there. IndexError, before any change, out of range."""
    assert values.dtype == "float32" and values.numel == indices.numel
    lib, pointer = _native.lib, _native.ffi.cast("float *", values.address)
    _check(lib.hs_take(*_wide(x), x.numel, _indices(indices), indices.numel, pointer), x)


def scatter_add(target: Memory, indices: Memory, values: Memory) -> None:
    """target[indices] += values. IndexError, before any change, out of range."""
    assert values.numel == indices.numel
    lib, into = _native.lib, (*_wide(target), target.numel)
    _check(lib.hs_scatter_add(*into, _indices(indices), *_wide(values), indices.numel), target)


def _wide(memory: Memory) -> tuple[Any, int]:
    return _native.ffi.cast("void *", memory.address), _WIDE[memory.dtype]


def _any(memory: Memory) -> tuple[Any, int]:
    return _native.ffi.cast("void *", memory.address), _TYPES[memory.dtype]


def _indices(memory: Memory) -> Any:
    assert memory.dtype == "int64"
    return _native.ffi.cast("int64_t *", memory.address)


def _check(in_range: int, target: Memory) -> None:
    if not in_range:
        raise IndexError(f"indices must be in [0, {target.numel})")


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
