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
from horovod_sparse.ops.protocol import Moments, Sums

_native: Any
try:
    _native = import_module("horovod_sparse.kernels._native")
except ImportError:
    _native = None

pool = BufferPool()
"""Lends the memory for messages, and for entries that are noted while gradients are taken in."""
_SPARE = 16
WIDE = {"float32": 0, "float64": 1}
"""Codes of the types of residuals and reduced gradients."""
_TYPES = {**WIDE, "bfloat16": 2, "float16": 3}
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


def share_threads() -> bool:
    """Use the threads of the framework's OpenMP runtime (`hs_share_threads`); return whether there is one."""
    return bool(_native.lib.hs_share_threads())


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


def accumulate(
    residual: Memory, gradients: list[Gradient], threads: int, moving: tuple[Memory, float, bool] | None = None
) -> list[int]:
    """Add each gradient to its part of the residual: see `protocol.Ops.accumulate`.

    `moving` is the velocity, the momentum, and whether it is Nesterov's.
    """
    return take_in(*writable(residual), residual, new_gradients(gradients), threads, moving)


def new_gradients(gradients: list[Gradient]) -> Any:
    """Return the gradients as an array of `hs_gradient`."""
    return _native.ffi.new("hs_gradient[]", gradients)


def new_notes(cut: float, room: int, indices: Any, values: Any, sums: bool) -> Any:
    """Return an `hs_notes` that nothing was noted in."""
    return _native.ffi.new("hs_notes *", (cut, room, indices, values, sums, (0, 0.0, 0.0, 0.0, 0.0), 0, 1, 1))


def take_in(
    pointer: Any,
    code: int,
    residual: Memory,
    parts: Any,
    threads: int,
    moving: tuple[Memory, float, bool] | None = None,
    notes: Any = None,
) -> list[int]:
    """Do as `accumulate`, with the kernel's own types, and note what `notes` asks for."""
    velocity, momentum, nesterov = _native.ffi.NULL, 0.0, False
    if moving is not None:
        memory, momentum, nesterov = moving
        if residual.numel != memory.numel or residual.dtype != memory.dtype:
            raise ValueError(f"velocity must be like the residual, {residual}, got {memory}")
        velocity = writable(memory)[0]
    bad = _native.lib.hs_accumulate(
        pointer,
        velocity,
        code,
        residual.numel,
        parts,
        len(parts),
        momentum,
        nesterov,
        threads,
        notes or _native.ffi.NULL,
    )
    if bad < 0:
        places = [(part.first, part.n) for part in parts]
        raise ValueError(f"gradients must be within the residual's {residual.numel} elements, got {places}")
    return [part.not_finite for part in parts] if bad else [0] * len(parts)


def measure(x: Memory, threads: int) -> Sums:
    """Return the sums of x."""
    return sums_of(_measure(*_wide(x), x.numel, 0.0, False, threads))


def moments(x: Memory, cut: float, with_log: bool, threads: int) -> Moments:
    """Return the moments of the excesses over a cut, which is not negative."""
    return moments_of(*_wide(x), x.numel, cut, with_log, threads)


def moments_of(pointer: Any, code: int, numel: int, cut: float, with_log: bool, threads: int) -> Moments:
    """Do as `moments`, with the kernel's own types."""
    sums = _measure(pointer, code, numel, cut, with_log, threads)
    return sums_of(sums).moments(sums.logs if with_log else math.nan)


def _measure(pointer: Any, code: int, numel: int, cut: float, with_log: bool, threads: int) -> Any:
    sums = _native.ffi.new("hs_sums *")
    _native.lib.hs_measure(pointer, code, numel, cut, with_log, threads, sums)
    return sums


def counts(x: Memory, thresholds: list[float], threads: int) -> list[int]:
    """Return how many entries are above each threshold."""
    return counts_of(*_wide(x), x.numel, thresholds, threads)


def counts_of(pointer: Any, code: int, numel: int, thresholds: list[float], threads: int) -> list[int]:
    """Do as `counts`, with the kernel's own types."""
    found: list[int] = []
    for start in range(0, len(thresholds), _MOST_THRESHOLDS):
        some = thresholds[start : start + _MOST_THRESHOLDS]
        numbers = _native.ffi.new("int64_t[]", len(some))
        _native.lib.hs_counts(pointer, code, numel, some, len(some), threads, numbers)
        found.extend(numbers)
    return found


def all_finite(x: Memory, threads: int) -> bool:
    """Return whether all entries are finite."""
    return bool(_native.lib.hs_all_finite(*_wide(x, _TYPES), x.numel, threads))


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


def pick_above(indices: Any, values: Any, code: int, number: int, threshold: float) -> NDArray[np.int64]:
    """Return those of `number` indices whose values are above the threshold. All are the kernel's own types."""
    picked = np.empty(number, np.int64)
    found = _native.lib.hs_pick_above(
        indices, values, code, number, threshold, _native.ffi.from_buffer("int64_t[]", picked)
    )
    return picked[:found]


def take(x: Memory, indices: Memory, values: Memory) -> None:
    """Set values to x[indices] rounded to float32, and subtract them from x.

    Raise IndexError, before any change, if an index is out of range.
    """
    if values.dtype != "float32" or values.numel != indices.numel:
        raise ValueError(f"values must be {indices.numel} of float32, got {values}")
    lib, pointer = _native.lib, _native.ffi.cast("float *", values.address)
    _check(lib.hs_take(*writable(x), x.numel, _indices(indices), indices.numel, pointer), x)


def send(x: Memory, indices: Memory, message: Memory) -> None:
    """Take the entries at `indices` out of x as `take` does, and write them as a message of pairs."""
    rows = message.numel // 2
    if indices.numel > rows or message.dtype != "int32":
        raise ValueError(f"there must be at most {rows} indices, and a message of int32, got {indices} and {message}")
    lib, pointer = _native.lib, _native.ffi.cast("int32_t *", _target_address(message))
    _check(lib.hs_send(*writable(x), x.numel, _indices(indices), indices.numel, rows, pointer), x)


def scatter_add(target: Memory, indices: Memory, values: Memory) -> None:
    """Add values to target[indices]. Raise IndexError, before any change, if an index is out of range."""
    if values.numel != indices.numel:
        raise ValueError(f"values must be {indices.numel}, got {values.numel}")
    lib, into = _native.lib, (*writable(target), target.numel)
    _check(lib.hs_scatter_add(*into, _indices(indices), *_wide(values), indices.numel), target)


class Target(NamedTuple):
    """A part of a buffer that is to be written."""

    address: int
    type: int
    """One of `WIDE`."""
    first: int
    """The index of the part's first entry in the buffer."""
    numel: int


def target_of(memory: Memory, first: int) -> Target:
    """Return the target that begins at `first` in its buffer. Raise unless a kernel can write to the memory."""
    return Target(_target_address(memory), WIDE[memory.dtype], first, memory.numel)


def assembler(messages: Memory, used: list[int], divisor: float) -> Callable[[list[Target]], None]:
    """See `protocol.Ops.assembler`."""
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
    """See `protocol.Ops.rows_in_use`; the indices are `stride` apart."""
    if indices.dtype != "int32" or indices.numel % world:
        raise ValueError(f"indices must be of {world} messages of the same length, of int32, got {indices}")
    used = _native.ffi.new("int64_t[]", world)
    pointer = _native.ffi.cast("int32_t *", indices.address)
    _native.lib.hs_rows_in_use(pointer, stride, indices.numel // world, world, numel, used)
    return [None if rows == -1 else rows for rows in used]


def union(messages: Memory, world: int, header: int, numel: int) -> NDArray[np.int64] | None:
    """See `protocol.Ops.union`."""
    length = messages.numel // world
    if messages.dtype != "int32" or messages.numel % world or length < header:
        raise ValueError(f"messages must be {world} of the same length, at least {header}, of int32, got {messages}")
    merged = np.empty(world * (length - header), np.int64)
    of_all = _native.ffi.cast("int32_t *", messages.address)
    found = _native.lib.hs_union(of_all, length, header, world, numel, pointer_of(merged, "int64_t *"))
    return None if found < 0 else merged[:found]


def distinct(draw: Callable[[int], NDArray[np.int64]], numel: int, k: int) -> NDArray[np.int64]:
    """See `protocol.Ops.distinct`."""
    marks, numbers, found = np.zeros((numel + 63) // 64, np.uint64), np.empty(k, np.int64), 0
    pointer = pointer_of(marks, "uint64_t *")
    while found < k:
        drawn = draw(k - found)
        found += _native.lib.hs_mark(pointer, pointer_of(drawn, "int64_t *"), len(drawn))
    _native.lib.hs_marked(pointer, len(marks), pointer_of(numbers, "int64_t *"))
    return numbers


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


def _wide(memory: Memory, types: dict[str, int] = WIDE) -> tuple[Any, int]:
    return _native.ffi.cast("void *", memory.address), types[memory.dtype]


def pointer_of(array: NDArray[Any], kind: str = "void *") -> Any:
    """Return the address of a contiguous array, which must live as long as the address is used."""
    return _native.ffi.cast(kind, array.__array_interface__["data"][0])


def writable(memory: Memory) -> tuple[Any, int]:
    """Return the same as `_wide` for memory that a kernel writes to. Raise ValueError if it is read-only."""
    _target_address(memory)
    return _wide(memory)


def _target_address(memory: Memory) -> int:
    if not memory.writable:
        raise ValueError(f"the array that a kernel writes to must be writable, got a read-only one of {memory.numel}")
    return memory.address


def _indices(memory: Memory) -> Any:
    if memory.dtype != "int64":
        raise ValueError(f"indices must be of int64, got {memory.dtype}")
    return _native.ffi.cast("int64_t *", memory.address)


def _check(in_range: int, target: Memory) -> None:
    if not in_range:
        raise IndexError(f"indices must be in [0, {target.numel})")


def sums_of(sums: Any) -> Sums:
    """Return the sums that a kernel has written."""
    return Sums(sums.count, sums.total, sums.squares, sums.largest)
