"""Find the threshold below the largest entry, or the largest entries by a sample. Imports no framework."""

from __future__ import annotations

import math

import numpy as np

from horovod_sparse.ops.protocol import Array, Ops

_MOST_CANDIDATES = 5
"""The most candidates, as a multiple of k: so few are cheaper to sort than the whole array."""
_LEAST_CANDIDATES = 1.75
"""If a quarter of the array is less than this multiple of k, a sample often finds too many, and is in vain."""
_NEAR = 1e-6
"""Above `_TINY`, neighbouring float32 differ by less than this fraction."""
_TINY = 1e-30
_LEAST_SAMPLED = 100
"""How many of the k largest entries a sample holds on average, at least: their number is then known to a tenth."""


def below_largest(largest: float, threshold: float) -> float:
    """Return `threshold`, lowered if necessary so that at least the largest entry exceeds it, unless all entries are zero."""
    if threshold < (1.0 - _NEAR) * largest and largest > _TINY:
        return threshold
    # The step down is in the precision of the comparison, which is that of the entries: float32 if it holds `largest`.
    with np.errstate(over="ignore"):
        single = np.float32(largest)
    below = np.nextafter(single, np.float32(0.0)) if float(single) == largest else math.nextafter(largest, 0.0)
    return min(threshold, float(below))


def largest_candidates(ops: Ops, x: Array, k: int) -> Array | None:
    """Return indices of a few entries that include the k largest, found by a sample of `x`; None if it finds no such few."""
    most, stride = min(_MOST_CANDIDATES * k, len(x) // 4), k // _LEAST_SAMPLED
    if most < _LEAST_CANDIDATES * k or stride <= 1:
        return None
    sample = x[:: stride | 1]
    for wanted in (1.5, 3.0):
        threshold = ops.kth_largest(sample, min(len(sample), math.ceil(wanted * k * len(sample) / len(x))))
        if threshold > 0.0:
            selection = ops.select_above(x, threshold, most)
            if k <= selection.found <= most:
                return selection.indices
    return None
