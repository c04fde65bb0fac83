"""Find a threshold by counting entries, or the largest entries by a sample. Imports no framework."""

from __future__ import annotations

import math

import numpy as np

from horovod_sparse.ops.protocol import Array, Ops

MOST_COUNTS = 12
_MOST_CANDIDATES = 5
"""The most candidates, as a multiple of k: so few are cheaper to sort than the whole array."""
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


def search_threshold(
    ops: Ops, x: Array, k: int, tolerance: float, *, not_zero: int, largest: float, start: float = math.nan
) -> float:
    """Return a threshold that about k of `not_zero` entries exceed.

    Their number is within `tolerance` of k if the data allow it, else the closest found. The search applies regula falsi to
    ln(count) over the threshold, which is a straight line for exponential tails. It alternates with bisection, so that the
    bracket at least halves every second count. It makes at most 12 passes over `x`. The first is at `start` if that lies
    within the data.
    """
    low, most = 0.0, not_zero
    high, fewest = largest, 0
    if most <= k:
        return low
    best, best_error = low, math.log(most / k)
    for step in range(MOST_COUNTS):
        part = 0.5 if step % 2 else math.log(most / k) / math.log(most / max(fewest, 0.5))
        guess = low + (high - low) * min(max(part, 0.01), 0.99)
        if step == 0 and low < start < high:
            guess = start
        if not low < guess < high:
            break
        (count,) = ops.counts(x, [guess])
        # A count of zero is taken as half an entry.
        error = abs(math.log(max(count, 0.5) / k))
        if error < best_error:
            best, best_error = guess, error
        if abs(count - k) <= tolerance * k:
            break
        if count > k:
            low, most = guess, count
        else:
            high, fewest = guess, count
    return best


def largest_candidates(ops: Ops, x: Array, k: int) -> Array | None:
    """Return indices of a few entries that include the k largest, found by a sample of `x`; None if it finds no such few."""
    most = min(_MOST_CANDIDATES * k, len(x) // 4)
    stride = k // _LEAST_SAMPLED
    if k >= most or stride <= 1:
        return None
    sample = x[:: stride | 1]
    for wanted in (1.5, 3.0):
        threshold = ops.kth_largest(sample, min(len(sample), math.ceil(wanted * k * len(sample) / len(x))))
        if threshold > 0.0:
            selection = ops.select_above(x, threshold, most)
            if k <= selection.found <= most:
                return selection.indices
    return None
