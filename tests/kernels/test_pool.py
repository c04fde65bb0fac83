"""Memory comes back when nobody looks at it any more, and not before."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from horovod_sparse.kernels.pool import ALIGNMENT, BufferPool


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("dtype", ["int32", "float32", "float64"])
@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_an_array_is_what_was_asked_for(count: int, dtype: str) -> None:
    array = BufferPool().lend(count, dtype)
    assert array.shape == (count,) and array.dtype == dtype
    assert array.flags.writeable and address(array) % ALIGNMENT == 0


def test_memory_comes_back() -> None:
    pool = BufferPool()
    array = pool.lend(1000, "float32")
    place = address(array)
    del array
    gc.collect()
    # A little less or more, or another type, is the same memory.
    assert address(pool.lend(1001, "int32")) == place


def test_views_and_tensors_keep_what_they_look_at() -> None:
    pool = BufferPool()
    array = pool.lend(100, "float32")
    array[:] = 1
    lookers = [array[3:7], array[::2].reshape(5, 10), torch.from_numpy(array)[50:]]
    del array
    gc.collect()
    for _ in range(3):
        pool.lend(100, "float32")[:] = 7
        others = [pool.lend(100, "float32") for _ in range(3)]
        for other in others:
            other[:] = 9
    for looker in lookers:
        assert (np.asarray(looker) == 1).all()


@pytest.mark.full
def test_threads_share_it() -> None:
    """Nobody gets what another one looks at, whoever gives it back: the last view, or garbage collection."""
    pool, handed_over = BufferPool(), list[np.ndarray]()

    def work(number: int) -> None:
        for turn in range(400):
            array = pool.lend(8, "float64")
            array[:] = number
            cycle: list[object] = [array[3:]]
            cycle.append(cycle)
            # Whoever clears the list gives these back.
            handed_over.append(array[:2])
            if turn % 3 == 0:
                handed_over.clear()
            if turn % 200 == 0:
                gc.collect()
            assert (array == number).all(), f"thread {number} reads {array}"

    before = sys.getswitchinterval()
    # Threads take turns as often as they can.
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
    finally:
        sys.setswitchinterval(before)
