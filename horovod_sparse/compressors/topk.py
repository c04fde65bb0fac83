"""Exact top-k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from horovod_sparse import exchanges
from horovod_sparse.compressors.base import ALONE, BucketState, Compressor, Place, Settings, check_boolean
from horovod_sparse.compressors.search import largest_candidates
from horovod_sparse.exchanges import Exchange
from horovod_sparse.ops import Array, Ops, Selection
from horovod_sparse.schedules import Schedule

if TYPE_CHECKING:
    from typing_extensions import Unpack


_LOWER = 0.95
"""The next step looks for the k largest among what exceeds this part of the k-th largest."""


@dataclass
class TopKState(BucketState):
    """With a guess, which makes the search faster and changes nothing in its result."""

    guess: float = 0.0


class TopK(Compressor):
    """The k entries of largest magnitude; among equal magnitudes the lowest indices.

    `||u - TopK(u)||^2 <= (1 - k/d) ||u||^2` (Definition 2.1 of https://arxiv.org/abs/1809.07599).
    With the residual this is Sparsified SGD with Memory. Exact, but the search for the k-th largest is dear.

    Args:
        ratio: fraction of entries to send, in (0, 1], or a schedule.
        union: False: each rank sends its own entries, as pairs. True: the ranks' indices are gathered, all ranks' values at
            their union are summed by allreduce, and all residuals become zero there: exact averages, at the price of
            sending up to k entries per worker (gradient build-up).
        others: those of `Compressor`. Message room is exactly k unless `capacity` says otherwise.
    """

    def __init__(self, ratio: float | Schedule, *, union: bool = False, **settings: Unpack[Settings]) -> None:
        super().__init__(ratio, **settings)
        check_boolean("union", union)
        self.union = union

    @property
    def exchange(self) -> Exchange:
        return exchanges.union if self.union else exchanges.pairs

    def new_state(self, place: Place = ALONE) -> TopKState:
        return TopKState(place)

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        assert isinstance(state, TopKState)
        candidates = largest_candidates(ops, x, k, state.guess)
        if candidates is None:
            return ops.select_largest(x, k)
        values = x[candidates]
        state.guess = _LOWER * ops.kth_largest(values, k)
        return Selection(candidates[ops.select_largest(values, k).indices], k)
