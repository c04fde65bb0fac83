"""The compiled kernels, if they are there. Imports no framework.

They work on `Memory`: an address, a type and a number of elements. An adapter makes it from its contiguous CPU arrays.
There is a variant for every kind of processor; all give the same bits. HOROVOD_SPARSE_KERNELS names the variant to use, or is
`auto` or 1 for the fastest one that this processor runs. If there was no compiler at installation, or with `off` or 0, there
are no kernels, and the adapters use their framework's operations.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import count, takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels.pool import BufferPool
from horovod_sparse.ops.protocol import Above, Moments, Sums, Wanted

_native: Any
try:
    _native = import_module("horovod_sparse.kernels._native")
except ImportError:
    _native = None

pool = BufferPool()
"""Lends the memory for `Notes` and for messages."""
_SPARE = 16
_MOST_INDICES = 2**31
"""The number of indices that int32 can hold."""
_WIDE = {"float32": 0, "float64": 1}
_TYPES = {**_WIDE, "bfloat16": 2, "float16": 3}
_NAMES = {np.dtype(name): name for name in ("float16", "float32", "float64", "int32", "int64")}
_MOST_THRESHOLDS = 16
VARIABLE = "HOROVOD_SPARSE_KERNELS"
NAMES = ("avx512", "avx2", "baseline", "neon")
"""The names of all variants: three for x86-64, one for AArch64."""


def compiled() -> bool:
    """Return whether the kernels were compiled."""
    return _native is not None


def turned_off() -> bool:
    """Return whether kernels are turned off, even if there are some. Raise ValueError if the variable has an unknown value."""
    return _asked() == "off"


def available() -> bool:
    """Return whether the kernels were compiled and are not turned off. If so, switch to the variant that is asked for."""
    asked = _asked()
    if not compiled() or asked == "off":
        return False
    _native.lib.hs_choose((variants()[0] if asked == "auto" else asked).encode())
    return True


def variant() -> str:
    """Return the name of the variant in use, or "off"."""
    if not available():
        return "off"
    asked = _asked()
    return variants()[0] if asked == "auto" else asked


@cache
def variants() -> tuple[str, ...]:
    """Return the names of the variants that this processor runs, the fastest first; none without compiled kernels."""
    if not compiled():
        return ()
    names = iter(_native.lib.hs_variant(number) for number in count())
    return tuple(_native.ffi.string(name).decode() for name in takewhile(bool, names))


def _asked() -> str:
    said = os.environ.get(VARIABLE, "auto")
    asked = {"": "auto", "1": "auto", "0": "off"}.get(said, said)
    if asked not in ("auto", "off", *variants()):
        raise ValueError(
            f"{VARIABLE} must be auto, off or one of {', '.join(NAMES)}, and this processor runs "
            f"{', '.join(variants()) or 'none, since the kernels were not compiled'}; got {said!r}"
        )
    return asked


class Memory(NamedTuple):
    """Contiguous elements of a CPU array."""

    address: int
    dtype: str
    """"float32" or "float64", for gradients also "bfloat16" or "float16"; "int64" for indices, "int32" for messages."""
    numel: int
    owner: object
    """The array, which must live as long as its memory is used."""
    writable: bool = True


def memory_of(array: NDArray[Any]) -> Memory:
    """Return the memory of a contiguous array."""
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise ValueError("the array must be contiguous and aligned")
    address = array.__array_interface__["data"][0]
    return Memory(address, name_of(array.dtype), array.size, array, array.flags.writeable)


def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a type as `Memory` has it."""
    # NumPy takes longer to make the name than a kernel takes for a small array.
    return _NAMES.get(dtype) or str(dtype)


def supports(dtype: str) -> bool:
    """Return whether the kernels can take gradients of this type."""
    return dtype in _TYPES


class Notes:
    """What is found out about a bucket's buffer while it takes in gradients; see `protocol.Notes`."""

    def __init__(self, wanted: Wanted, dtype: str, numel: int) -> None:
        room = min(wanted.room, numel) if wanted.cut < math.inf and numel <= _MOST_INDICES else 0
        size = 4 if dtype == "float32" else 8
        memory = pool.lend(room * (size + 4), "uint8")
        self._wanted, self._numel = wanted, numel
        self._values, self._indices = memory[: room * size].view(dtype), memory[room * size :].view("int32")
        ffi = _native.ffi
        address = memory.__array_interface__["data"][0]
        self.raw = ffi.new("hs_notes *")
        self.raw.cut, self.raw.room, self.raw.complete, self.raw.with_sums = wanted.cut, room, 1, wanted.sums
        self.raw.values = ffi.cast("void *", address)
        self.raw.indices = ffi.cast("int32_t *", address + room * size)
        self._taken: list[tuple[int, Any]] = []
        """For each group of gradients: how many entries above the cut there were before it, and the gradients."""
        self._seen = 0
        """The number of elements of all parts so far; more than the buffer has once `forget` was called."""

    def forget(self) -> None:
        """Make the notes invalid: nothing is known of the buffer any more in this step."""
        self._seen = self._numel + 1

    def add(self, gradients: Any, numel: int, before: int) -> None:
        """Note gradients of `numel` elements that were taken in. There were `before` entries above the cut before them."""
        self._seen += numel
        self._taken.append((before, gradients))

    @property
    def sums(self) -> Sums | None:
        return _sums(self.raw.sums) if self._wanted.sums and self._seen == self._numel else None

    @property
    def above(self) -> Above | None:
        raw = self.raw
        if not raw.complete or not raw.room or self._seen != self._numel:
            return None
        indices, values = self._indices[: raw.found], self._values[: raw.found]
        runs = self._runs()
        if len(runs) > 1:
            indices, values = (np.concatenate([array[run] for run in runs]) for array in (indices, values))
        return Above(self._wanted.cut, indices, values)

    def _runs(self) -> list[slice]:
        """Return slices of the entries above the cut, in the order of the buffer; the parts may have come in another order."""
        parts = []
        for begin, gradients in self._taken:
            for gradient in gradients:
                parts.append((gradient.first, begin, gradient.found))
                begin = gradient.found
        runs: list[slice] = []
        for _, begin, end in sorted(parts):
            if runs and runs[-1].stop == begin:
                runs[-1] = slice(runs[-1].start, end)
            elif begin < end:
                runs.append(slice(begin, end))
        return runs


class Gradient(NamedTuple):
    """The gradient of a part of a buffer."""

    address: int
    type: int
    """See `code_of`."""
    first: int
    """The index of the part's first entry in the buffer."""
    numel: int


def code_of(dtype: str) -> int:
    """Return the code of a gradient's type, for `Gradient`."""
    return _TYPES[dtype]


class Taken(NamedTuple):
    """The result for a gradient that had entries that are not finite, or that made its part of the residual overflow."""

    number: int
    """The position of the gradient in the list of gradients."""
    not_finite: int
    """The number of its entries that were left out because they are not finite."""
    overflowed: bool
    """True if its part of the residual has an infinite entry now."""


def accumulate(
    residual: Memory,
    gradients: list[Gradient],
    threads: int,
    notes: Notes | None = None,
    velocity: Memory | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> list[Taken]:
    """Add each gradient to its part of the residual where it is finite; with a velocity see `protocol.Moving`."""
    if velocity is not None and (residual.numel != velocity.numel or residual.dtype != velocity.dtype):
        raise ValueError(f"velocity must be like the residual, {residual}, got {velocity}")
    ffi = _native.ffi
    raw, before = (ffi.NULL, 0) if notes is None else (notes.raw, notes.raw.found)
    parts = ffi.new("hs_gradient[]", gradients)
    bad = _native.lib.hs_accumulate(
        *_target(residual)[:1],
        ffi.NULL if velocity is None else _target(velocity)[0],
        _WIDE[residual.dtype],
        residual.numel,
        parts,
        len(gradients),
        momentum,
        nesterov,
        threads,
        raw,
    )
    if bad < 0:
        raise ValueError(f"gradients must be within the residual's {residual.numel} elements, got {gradients}")
    if notes is not None:
        notes.add(parts, sum([gradient[3] for gradient in gradients]), before)
    if not bad:
        return []
    taken = [Taken(number, part.not_finite, bool(part.overflowed)) for number, part in enumerate(parts)]
    if notes is not None and any(one.overflowed for one in taken):
        notes.forget()
    return [one for one in taken if one.not_finite or one.overflowed]


def measure(x: Memory, threads: int) -> Sums:
    """Return the sums of x."""
    return _sums(_measure(x, 0.0, False, threads))


def moments(x: Memory, cut: float, with_log: bool, threads: int) -> Moments:
    """Return the moments of the excesses over a cut, which is not negative."""
    sums = _measure(x, cut, with_log, threads)
    return _sums(sums).moments(sums.logs if with_log else math.nan)


def _measure(x: Memory, cut: float, with_log: bool, threads: int) -> Any:
    sums = _native.ffi.new("hs_sums *")
    _native.lib.hs_measure(*_wide(x), x.numel, cut, with_log, threads, sums)
    return sums


def counts(x: Memory, thresholds: list[float], threads: int) -> list[int]:
    """Return how many entries are above each threshold."""
    found: list[int] = []
    for start in range(0, len(thresholds), _MOST_THRESHOLDS):
        some = thresholds[start : start + _MOST_THRESHOLDS]
        numbers = _native.ffi.new("int64_t[]", len(some))
        _native.lib.hs_counts(*_wide(x), x.numel, some, len(some), threads, numbers)
        found.extend(numbers)
    return found


def all_finite(x: Memory, threads: int) -> bool:
    """Return whether all entries are finite."""
    return bool(_native.lib.hs_all_finite(*_any(x), x.numel, threads))


def select_above(x: Memory, threshold: float, expected: int, threads: int) -> NDArray[np.int64]:
    """Return the indices of all entries above the threshold; mostly in one pass if there are at most a few times `expected`."""
    room = min(_SPARE * expected, x.numel)
    complete = _native.ffi.new("int *")
    while True:
        # Memory that is not written to costs nothing, but a second pass does.
        indices = np.empty(room, np.int64)
        pointer = _indices(memory_of(indices))
        found = int(_native.lib.hs_select_above(*_wide(x), x.numel, threshold, pointer, room, threads, complete))
        if complete[0]:
            return indices[:found]
        room, threads = found, 1


def take(x: Memory, indices: Memory, values: Memory) -> None:
    """Set values to x[indices] rounded to float32, and subtract them from x.

    Raise IndexError, before any change, if an index is out of range.
    """
    if values.dtype != "float32" or values.numel != indices.numel:
        raise ValueError(f"values must be {indices.numel} of float32, got {values}")
    lib, pointer = _native.lib, _native.ffi.cast("float *", values.address)
    _check(lib.hs_take(*_target(x), x.numel, _indices(indices), indices.numel, pointer), x)


def scatter_add(target: Memory, indices: Memory, values: Memory) -> None:
    """Add values to target[indices]. Raise IndexError, before any change, if an index is out of range."""
    if values.numel != indices.numel:
        raise ValueError(f"values must be {indices.numel}, got {values.numel}")
    lib, into = _native.lib, (*_target(target), target.numel)
    _check(lib.hs_scatter_add(*into, _indices(indices), *_wide(values), indices.numel), target)


class Target(NamedTuple):
    """A part of a buffer that is to be written."""

    address: int
    type: int
    """The code of float32 or float64; see `target_of`."""
    first: int
    """The index of the part's first entry in the buffer."""
    numel: int


def target_of(memory: Memory, first: int) -> Target:
    """Return the target that begins at `first` in its buffer. Raise unless a kernel can write to the memory."""
    return Target(_target_address(memory), _WIDE[memory.dtype], first, memory.numel)


def assembler(messages: Memory, used: list[int], divisor: float) -> Callable[[list[Target]], None]:
    """See `Ops.assembler`."""
    world = len(used)
    if messages.dtype != "int32" or not world or messages.numel % (2 * world):
        raise ValueError(f"messages must be {world} of the same length, of int32, got {messages}")
    capacity = messages.numel // (2 * world)
    if not all(0 <= rows <= capacity for rows in used):
        raise ValueError(f"used must be within [0, {capacity}], got {used}")
    pointer, rows = _native.ffi.cast("int32_t *", messages.address), _native.ffi.new("int64_t[]", used)
    owner = messages.owner

    def assemble(targets: list[Target]) -> None:
        of_these = _native.ffi.new("hs_target[]", targets)
        if not _native.lib.hs_assemble(of_these, len(targets), pointer, capacity, world, rows, divisor):
            raise IndexError(f"indices must be ascending, got {owner}")

    return assemble


def pack(indices: Memory, values: Memory, message: Memory) -> None:
    """Write a message of pairs (`wire`, message 1)."""
    rows = message.numel // 2
    if not indices.numel == values.numel <= rows or (values.dtype, message.dtype) != ("float32", "int32"):
        raise ValueError(f"there must be as many float32 values as indices, at most {rows}, got {indices} and {values}")
    address = _target_address(message)
    _native.lib.hs_pack(
        _indices(indices),
        _native.ffi.cast("float *", values.address),
        indices.numel,
        rows,
        _native.ffi.cast("int32_t *", address),
    )


def rows_in_use(indices: Memory, stride: int, world: int, numel: int) -> list[int | None]:
    """See `Ops.rows_in_use`; the indices are `stride` apart."""
    if indices.dtype != "int32" or indices.numel % world:
        raise ValueError(f"indices must be of {world} messages of the same length, of int32, got {indices}")
    used = _native.ffi.new("int64_t[]", world)
    pointer = _native.ffi.cast("int32_t *", indices.address)
    _native.lib.hs_rows_in_use(pointer, stride, indices.numel // world, world, numel, used)
    return [None if rows == -1 else rows for rows in used]


def unpack(message: Memory, used: int, indices: Memory, values: Memory) -> None:
    """Read the first `used` rows of a message of pairs."""
    if not used == indices.numel == values.numel <= message.numel // 2:
        raise ValueError(f"there must be room for {used} of {message.numel // 2} rows, got {indices} and {values}")
    if (message.dtype, values.dtype) != ("int32", "float32"):
        raise ValueError(f"messages must be of int32 and values of float32, got {message.dtype} and {values.dtype}")
    _native.lib.hs_unpack(
        _native.ffi.cast("int32_t *", message.address),
        used,
        _indices(indices),
        _native.ffi.cast("float *", values.address),
    )


def _wide(memory: Memory) -> tuple[Any, int]:
    return _native.ffi.cast("void *", memory.address), _WIDE[memory.dtype]


def _target(memory: Memory) -> tuple[Any, int]:
    """Return the same as `_wide` for memory that a kernel writes to. Raise ValueError if it is read-only."""
    _target_address(memory)
    return _wide(memory)


def _target_address(memory: Memory) -> int:
    if not memory.writable:
        raise ValueError(f"the array that a kernel writes to must be writable, got a read-only one of {memory.numel}")
    return memory.address


def _any(memory: Memory) -> tuple[Any, int]:
    return _native.ffi.cast("void *", memory.address), _TYPES[memory.dtype]


def _indices(memory: Memory) -> Any:
    if memory.dtype != "int64":
        raise ValueError(f"indices must be of int64, got {memory.dtype}")
    return _native.ffi.cast("int64_t *", memory.address)


def _check(in_range: int, target: Memory) -> None:
    if not in_range:
        raise IndexError(f"indices must be in [0, {target.numel})")


def _sums(sums: Any) -> Sums:
    return Sums(sums.count, sums.total, sums.squares, sums.largest)
