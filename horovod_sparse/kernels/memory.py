"""How kernels see the arrays of a framework. Imports no framework. Tested by tests/kernels/test_ops.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from horovod_sparse.ops.protocol import Array, Moving, Ops, Part

TYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")
"""The types of arrays. The number of a float type is its code in kernels.h."""
FLOAT32, FLOAT64, _, FLOAT16, INT32, INT64 = range(len(TYPES))


class Memory(NamedTuple):
    """Contiguous elements in the host's memory."""

    pointer: Any
    """Their address, a `void *`."""
    type: int
    """The number of their type in `TYPES`."""
    numel: int
    owner: object
    """The array, or the contiguous copy of it. It must live as long as the memory is used."""
    writable: bool
    """Whether kernels may write to the memory: it is the array's own, and no copy."""


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

    def array(self, host: NDArray[Any], /) -> Array:
        """Return the framework's array that has the memory of `host`."""

    def add_noting(
        self, residual: Memory, gradients: Sequence[Part], moving: Moving | None, rate: float, notes: Any = None
    ) -> Any | None:
        """Do as `accumulate`, and note what `notes`, a `hs_notes *`, asks for.

        Return an array of `hs_part`, which hold the results; None, and do nothing, if kernels do not take all of the gradients.
        """
