"""Random-k: entries chosen at random, not by size. Tested by tests/compressors/test_draws.py."""

from __future__ import annotations

import zlib

from horovod_sparse.compressors.base import BucketState
from horovod_sparse.compressors.draws import RandomCompressor, distinct, generator
from horovod_sparse.ops.protocol import Array, Ops, Selection


class RandomK(RandomCompressor):
    """Draws k entries uniformly without replacement, anew in every step.

    `E||u - C(u)||^2 = (1 - k/d) ||u||^2` (Definition 2.1 of https://arxiv.org/abs/1809.07599). Values are sent as they are:
    the factor d/k that would make the operator unbiased makes error feedback diverge.

    Args: those of `RandomCompressor`.
    """

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        drawn = distinct(generator(self.seed, state, shared=self.shared), len(x), k)
        state.fingerprint = zlib.crc32(drawn.data) >> 1 if self.shared else 0
        return Selection(ops.indices(drawn, x), k)
