"""Random-block: neighbouring entries, chosen at random. Tested by tests/compressors/test_draws.py."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.compressors.base import BucketState
from horovod_sparse.compressors.draws import RandomCompressor, draw


class RandomBlock(RandomCompressor):
    """A block of k neighbouring entries that begins anywhere and wraps around the end (https://arxiv.org/abs/2009.09271).

    The start is uniform on {0, ..., d - 1}, so every entry is sent with probability exactly k/d, and
    `E||u - C(u)||^2 = (1 - k/d) ||u||^2`. If a bucket is large, most layers get no update in a step.

    Args: those of `RandomCompressor`.
    """

    def drawn(self, numel: int, k: int, state: BucketState) -> NDArray[np.int64]:
        start = draw(self.seed, state, shared=self.shared) % numel
        state.fingerprint = zlib.crc32(start.to_bytes(8, "little")) >> 1 if self.shared else 0
        chosen = np.arange(start, start + k)
        return chosen if chosen[-1] < numel else np.sort(chosen % numel)
