"""How kernels see the arrays of a framework, and the calls of kernels that both classes of operations make. No framework."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import ffi, lib
from horovod_sparse.ops.protocol import Array, Moving, Ops, Part, Selection, Sums

TYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")
"""The types of arrays. The number of a float type is its code in kernels.h."""
FLOAT32, FLOAT64, _, FLOAT16, INT32, INT64 = range(len(TYPES))
Block = tuple[Any, int, int]
"""What kernels take for an array: its address, the number of its type, and the number of its elements."""


class Memory(NamedTuple):
    """Contiguous elements in the host's memory."""

    address: int
    type: int
    """The number of their type in `TYPES`."""
    numel: int
    owner: object
    """The array, or the contiguous copy of it. It must live as long as the memory is used."""
    writable: bool
    """Whether kernels may write to the memory: it is the array's own, and no copy."""

    def pointer(self) -> Any:
        """Return the address as kernels take it."""
        return ffi.cast("void *", self.address)

    def read(self) -> Block:
        """Return what kernels take for an array that they read."""
        return self.pointer(), self.type, self.numel

    def write(self) -> Block:
        """Return what kernels take for an array that they write to. Raise ValueError if the memory is not writable."""
        if not self.writable:
            raise ValueError(
                f"the array that a kernel writes to must be contiguous, aligned and writable, got one of {self.numel} "
                "elements that is not"
            )
        return self.pointer(), self.type, self.numel


@cache
def type_of(dtype: object) -> int | None:
    """Return the number of a framework's type in `TYPES`; None if kernels do not know it."""
    name = str(dtype).rpartition(".")[2]
    return TYPES.index(name) if name in TYPES else None


class HostOps(Ops, Protocol):
    """What a framework adds to its operations so that kernels work on its arrays."""

    def threads(self) -> int:
        """Return the number of threads that a kernel may use."""

    def memory(self, array: Array) -> Memory | None:
        """Return the memory of an array, or of a contiguous copy; None if it is elsewhere or kernels do not know its type."""

    def array(self, host: NDArray[Any]) -> Array:
        """Return the framework's array that has the memory of `host`."""

    def select_named(self, x: Array, names: NDArray[np.int32] | None, threshold: float, capacity: int) -> Selection:
        """Do as `select_above`. If x holds some entries of an array, `names` are their indices in it."""


def take_in(
    ops: HostOps, residual: Block, gradients: Sequence[Part], moving: Moving | None, rate: float, notes: Any = None
) -> Any | None:
    """Do as `Ops.accumulate`, and note what `notes` asks for. `residual` is the `Memory.write` of the buffer.

    Return an array of `hs_part`, which hold the results; None, and do nothing, if kernels do not take all of the gradients.
    """
    given, owners = [], []
    for first, gradient in gradients:
        memory = ops.memory(gradient)
        if memory is None or memory.type > FLOAT16:
            return None
        given.append((memory.address, memory.type, first, memory.numel))
        # Contiguous copies live as long as their memory is used.
        owners.append(memory.owner)
    pointer, code, numel = residual
    velocity, factor, ahead = ffi.NULL, 0.0, None
    if moving is not None:
        memory = ops.memory(moving.velocity)
        if memory is None or memory[1:3] != residual[1:]:
            raise ValueError(f"velocity must be like the residual, {numel} of {TYPES[code]}, got {memory}")
        (velocity, _, _), (factor, ahead) = memory.write(), moving.momentum
    parts = ffi.new("hs_part[]", given)
    what = parts, len(parts), factor, ahead or 0.0, ahead is not None, rate, ops.threads(), notes or ffi.NULL
    if not lib.hs_accumulate(pointer, velocity, code, numel, *what):
        places = [(part.first, part.n) for part in parts]
        raise ValueError(f"gradients must be within the residual's {numel} elements, got {places}")
    return parts


def sums_of(sums: Any, with_log: bool = False) -> Sums:
    """Return the sums that a kernel has written."""
    return Sums(sums.count, sums.total, sums.squares, sums.largest, sums.logs if with_log else math.nan)
