"""Random-k: entries chosen by chance, not by size."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from horovod_sparse import exchanges
from horovod_sparse.compressors.base import BucketState, Compressor, Settings, check_boolean, check_integer
from horovod_sparse.compressors.draws import generator
from horovod_sparse.exchanges import Exchange
from horovod_sparse.ops import Array, Ops, Selection
from horovod_sparse.schedules import Schedule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RandomK(Compressor):
    """k entries drawn uniformly without replacement, anew in every step.

    `E||u - C(u)||^2 = (1 - k/d) ||u||^2` (Definition 2.1 of https://arxiv.org/abs/1809.07599). Values are sent as they are:
    the factor d/k that would make the operator unbiased makes error feedback diverge.

    Args:
        ratio: fraction of entries to send, in (0, 1], or a schedule.
        shared: True: all workers draw the same entries, so that their values alone are sent, by allreduce; the sum of
            many workers is as sparse as one's share. False: each draws its own, and sends pairs by allgather.
        seed: of the draws, an int >= 0, the same on all ranks. No other random generator is touched.
        others: those of `Compressor`. Message room is exactly k.
    """

    def __init__(
        self, ratio: float | Schedule, *, shared: bool = True, seed: int = 0, **settings: Unpack[Settings]
    ) -> None:
        super().__init__(ratio, **settings)
        check_boolean("shared", shared)
        check_integer("seed", seed, 0)
        self.shared = shared
        self.seed = seed

    @property
    def exchange(self) -> Exchange:
        return exchanges.shared_indices if self.shared else exchanges.pairs

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        drawn = generator(self.seed, state, shared=self.shared).choice(len(x), k, replace=False, shuffle=False)
        drawn = np.sort(drawn.astype(np.int64))
        state.fingerprint = zlib.crc32(drawn.tobytes()) >> 1 if self.shared else 0
        return Selection(ops.indices(drawn, x), k)
