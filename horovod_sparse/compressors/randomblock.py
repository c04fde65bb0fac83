"""Random-block: neighbouring entries, chosen at random."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from horovod_sparse.compressors.base import BucketState
from horovod_sparse.compressors.checks import check_integer
from horovod_sparse.compressors.draws import RandomCompressor
from horovod_sparse.exchange.balanced import Balanced
from horovod_sparse.ops.protocol import Array, Ops, Selection


@dataclass(eq=False, repr=False, kw_only=True)
class RandomBlock(RandomCompressor):
    """A block of k neighbouring entries that begins anywhere and wraps around the end (https://arxiv.org/abs/2009.09271).

    The start is uniform on {0, ..., d - 1}, so every entry is sent with probability exactly k/d, and
    `E||u - C(u)||^2 = (1 - k/d) ||u||^2`. (Blocks aligned to multiples of k would never send the last d mod k entries.)

    Args:
        blocks: number of blocks that the k entries are divided into, with random gaps between them, >= 1. With one block
            and a large bucket most layers get no update in a step.
        others: those of `RandomCompressor`.
    """

    # Its entries lie in one place, and a region has room for about 1.5 k/workers.
    refuses = (*RandomCompressor.refuses, Balanced)

    blocks: int = 1

    def __post_init__(self) -> None:
        check_integer("blocks", self.blocks, 1)
        super().__post_init__()

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        numel, blocks = len(x), min(self.blocks, k)
        draws = self.draws(state)
        start = int(draws.integers(numel))
        size, longer = divmod(k, blocks)
        # Whatever the gaps are, the shift by a uniform start gives every entry the same chance.
        pieces = []
        for number, gap in enumerate(draws.multinomial(numel - k, [1.0 / blocks] * blocks).tolist()):
            pieces.append(np.arange(start, start + size + (number < longer)))
            start = int(pieces[-1][-1]) + 1 + gap
        starts = np.array([piece[0] for piece in pieces], np.int64)
        chosen = np.concatenate(pieces)
        state.fingerprint = zlib.crc32(starts.data) >> 1 if self.shared else 0
        if chosen[-1] >= numel:
            chosen = np.sort(chosen % numel)
        return Selection(ops.indices(chosen, x), k)
