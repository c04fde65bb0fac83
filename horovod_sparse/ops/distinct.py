"""Draws different numbers: the operation of frameworks that have no kernel for it. Imports NumPy only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_MANY = 16
"""If more than one number in `_MANY` is drawn, marking each number takes less time than sorting."""


def distinct(draw: Callable[[int], NDArray[np.int64]], numel: int, k: int) -> NDArray[np.int64]:
    """See `protocol.Ops.distinct`."""
    if k > numel // _MANY:
        marked, found = np.zeros(numel, bool), 0
        while found < k:
            marked[draw(k - found)] = True
            found = int(np.count_nonzero(marked))
        return np.flatnonzero(marked)
    drawn = np.empty(0, np.int64)
    while len(drawn) < k:
        more = np.sort(draw(k - len(drawn)))
        # This sort merges runs that are already in order.
        drawn = np.sort(np.concatenate((drawn, more)), kind="stable")
        drawn = drawn[np.diff(drawn, prepend=-1) > 0]
    return drawn
