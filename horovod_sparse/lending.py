"""Memory that is used again as soon as nobody looks at it any more: fresh memory costs a page fault per 4 KiB. NumPy only."""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Bytes: a line of the cache, and what TensorFlow asks of memory that it takes over."""


class Lender:
    """Keeps what was lent and came back, by size.

    Threads may share it. Memory comes back in whichever thread drops the last view or collects garbage, also while that
    thread is inside of a method here. So there is no lock, which such a thread would wait for for ever: every change is one
    operation of a list or a dict, which nothing interrupts.
    """

    def __init__(self) -> None:
        self._spare: dict[int, list[memoryview]] = {}

    def lend(self, count: int, dtype: str) -> NDArray[np.generic]:
        """An array of anything. Its memory comes back when neither it nor any view or tensor of it is left."""
        size = count * np.dtype(dtype).itemsize
        # Powers of two, so that sizes that change a little find something. What is not written to takes no memory.
        rounded = 1 << (max(size, 1) - 1).bit_length()
        spare = self._spare.setdefault(rounded, [])
        try:
            memory = spare.pop()
        except IndexError:
            memory = _aligned(rounded)
        # Views of the array keep it alive: it is no view of another array, whose views they would be.
        array: NDArray[np.generic] = np.frombuffer(memory[:size], dtype)
        weakref.finalize(array, spare.append, memory).atexit = False
        return array

    def forget(self) -> None:
        """Give back what is not lent; what is lent now does not come back."""
        self._spare = {}


def _aligned(size: int) -> memoryview:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].data
