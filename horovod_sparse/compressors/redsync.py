"""RedSync: a threshold between the mean and the largest magnitude."""

from __future__ import annotations

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.ops.protocol import Array, Ops, Selection

PARTS = (0.8, 0.6, 0.4, 0.2, 0.0)
"""Values of r that are tried: fractions of the way from the mean to the largest magnitude."""


class RedSync(Compressor):
    """RedSync's trimmed top-k (https://arxiv.org/abs/1808.04357): `eta(r) = A + r (X - A)`.

    A is the mean and X the largest magnitude. r is lowered from 0.8 in steps of 0.2 until at least k entries exceed eta, and
    the exact top-k of those are sent. This selects what `TopK` does, except that it never sends zeros. The paper also bisects
    for a threshold, uses one threshold for several steps, and sends one mean instead of the values (quantisation). None of
    these is implemented.

    Args:
        others: those of `Compressor`. Message capacity is k unless `slack` says otherwise.
    """

    needs_sums = True

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        sums = ops.measure(x)
        if sums.count <= k:
            state.threshold = 0.0
            state.expect(0.0)
            return ops.select_above(x, 0.0, capacity)
        selection = ops.select_largest(x, k)
        state.threshold = tried(sums.total / len(x), sums.largest, selection.smallest)
        state.expect(selection.smallest)
        return selection


def tried(mean: float, largest: float, smallest: float) -> float:
    """Return the threshold at which the search would end if `smallest` is the k-th largest magnitude."""
    thresholds = (mean + part * (largest - mean) for part in PARTS)
    # At least k entries exceed every threshold below the k-th largest magnitude, so nothing has to be counted.
    return next((threshold for threshold in thresholds if threshold < smallest), 0.0)
