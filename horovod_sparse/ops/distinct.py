"""Draws different numbers by marking them: the operation of frameworks that have no kernel for it. Imports NumPy only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def marked_distinct(draw: Callable[[int], NDArray[np.int64]], numel: int, k: int) -> NDArray[np.int64]:
    """See `protocol.Ops.distinct`."""
    marked, found = np.zeros(numel, bool), 0
    while found < k:
        marked[draw(k - found)] = True
        found = int(np.count_nonzero(marked))
    return np.flatnonzero(marked)
