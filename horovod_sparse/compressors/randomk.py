"""Random-k: entries chosen at random, not by size. Tested by tests/compressors/test_draws.py."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.compressors.base import BucketState
from horovod_sparse.compressors.draws import RandomCompressor, distinct, generator


class RandomK(RandomCompressor):
    """Draws k entries uniformly without replacement, anew in every step.

    `E||u - C(u)||^2 = (1 - k/d) ||u||^2` (Definition 2.1 of https://arxiv.org/abs/1809.07599). Values are sent as they are:
    the factor d/k that would make the operator unbiased makes error feedback diverge.

    Args: those of `RandomCompressor`.
    """

    def drawn(self, numel: int, k: int, state: BucketState) -> NDArray[np.int64]:
        chosen = distinct(generator(self.seed, state, shared=self.shared), numel, k)
        state.fingerprint = zlib.crc32(chosen.data) >> 1 if self.shared else 0
        return chosen
