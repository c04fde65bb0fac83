"""Reuses memory as soon as nothing refers to it any more: fresh memory costs a page fault per 4 KiB. NumPy only."""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Alignment in bytes: the size of a cache line, and what TensorFlow requires of memory that it takes over."""


class BufferPool:
    """Lends memory and keeps what came back, by size.

    Threads may share it. Memory comes back in the thread that drops the last view or collects garbage, even while that
    thread is inside a method of this class. That thread would wait for a lock forever, so there is none. Instead, every change
    is one operation of a list or a dict, which nothing interrupts.
    """

    def __init__(self) -> None:
        self._spare: dict[int, list[memoryview]] = {}

    def lend(self, count: int, dtype: str) -> NDArray[np.generic]:
        """Return an array with arbitrary contents. Its memory comes back when no reference, view or tensor of it is left."""
        size = count * np.dtype(dtype).itemsize
        # Round up to a power of two, so that a slightly different size can reuse it. What is not written to takes no memory.
        rounded = 1 << (max(size, 1) - 1).bit_length()
        spare = self._spare.setdefault(rounded, [])
        try:
            memory = spare.pop()
        except IndexError:
            fresh = np.empty(rounded + ALIGNMENT, np.uint8)
            start = -fresh.ctypes.data % ALIGNMENT
            memory = fresh[start : start + rounded].data
        # Views of the array keep it alive. If it were a view of another array, they would be views of that one.
        array: NDArray[np.generic] = np.frombuffer(memory[:size], dtype)
        weakref.finalize(array, spare.append, memory).atexit = False
        return array
