"""RedSync: a threshold between the mean and the largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.compressors.checks import check_choice
from horovod_sparse.ops.protocol import Array, Ops, Selection

PARTS = (0.8, 0.6, 0.4, 0.2, 0.0)
"""Values of r that "trim" tries: fractions of the way from the mean to the largest magnitude."""
MOST_PROBES = 10
"""Most probes of the binary search. They find its threshold to a thousandth of the largest magnitude."""


@dataclass(eq=False, repr=False, kw_only=True)
class RedSync(Compressor):
    """RedSync (https://arxiv.org/abs/1808.04357): `eta(r) = A + r (X - A)`; A is the mean and X the largest magnitude.

    "trim" lowers r from 0.8 in steps of 0.2 until at least k entries exceed eta, and sends the exact top-k of those. It
    selects what `TopK` does, from fewer entries, except that it never sends zeros. "bisect" halves the bracket of eta, from 0
    to X, at most 10 times, until between k and 2k entries exceed eta, and sends those. If no such eta is found, because of
    equal magnitudes or an entry that is huge beside the others, it does as "trim". The paper also uses one threshold for
    several steps, and sends one mean instead of the values (quantisation). Neither is implemented.

    Args:
        method: "trim" or "bisect". The count of "bisect" lies anywhere from k to 2k.
        others: those of `Compressor`. Message capacity is k with "trim" and 2k with "bisect" unless `slack` says otherwise.
    """

    needs_sums = True

    method: Literal["trim", "bisect"] = "trim"

    def __post_init__(self) -> None:
        check_choice("method", self.method, ("trim", "bisect"))
        if self.method == "bisect":
            self.take_slack(2.0)
        super().__post_init__()

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        sums = ops.measure(x)
        if sums.count <= k:
            state.threshold = 0.0
            return ops.select_above(x, 0.0, capacity)
        low, high = 0.0, sums.largest
        for _ in range(MOST_PROBES if self.method == "bisect" else 0):
            middle = 0.5 * (low + high)
            count = ops.count(x, middle)
            if k <= count <= 2 * k:
                state.threshold = middle
                state.expect(middle, k)
                return ops.select_above(x, middle, capacity)
            low, high = (low, middle) if count < k else (middle, high)
        selection = ops.select_largest(x, k)
        smallest, mean = selection.smallest, sums.total / len(x)
        thresholds = (mean + part * (sums.largest - mean) for part in PARTS)
        # At least k entries exceed every threshold below the k-th largest magnitude, so nothing has to be counted.
        state.threshold = next((threshold for threshold in thresholds if threshold < smallest), 0.0)
        state.expect(smallest, k)
        return selection
