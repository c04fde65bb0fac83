"""Exact top-k."""

from __future__ import annotations

from typing import TYPE_CHECKING

from horovod_sparse.compressors.base import BucketState, Compressor, Settings
from horovod_sparse.compressors.checks import check_boolean
from horovod_sparse.compressors.schedules import Schedule
from horovod_sparse.exchange import protocols
from horovod_sparse.exchange.protocols import Exchange
from horovod_sparse.ops.protocol import Array, Ops, Selection

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TopK(Compressor):
    """Selects the k entries of largest magnitude; among equal magnitudes those with the lowest indices.

    `||u - TopK(u)||^2 <= (1 - k/d) ||u||^2` (Definition 2.1 of https://arxiv.org/abs/1809.07599).
    The selection is exact, but the search for the k-th largest is expensive. With the residual this is Sparsified SGD with
    Memory, if the optimizer is SGD without momentum, and the learning rate is constant or `lr_in_residual` is set.

    Args:
        ratio: fraction of entries to send, in (0, 1], or a schedule.
        union: False: each rank sends its own entries, as pairs. True: the ranks' indices are gathered, all ranks' values at
            their union are summed by allreduce, and all residuals become zero there. This gives exact averages, at the cost
            of sending up to k entries per worker (gradient build-up).
        others: those of `Compressor`. Message capacity is exactly k unless `slack` says otherwise.
    """

    def __init__(self, ratio: float | Schedule, *, union: bool = False, **settings: Unpack[Settings]) -> None:
        check_boolean("union", union)
        self.union = union
        super().__init__(ratio, **settings)

    @property
    def exchange(self) -> Exchange:
        return protocols.union if self.union else super().exchange

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        selection = ops.select_largest(x, k)
        state.expect(selection.smallest, k)
        return selection
