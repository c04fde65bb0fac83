"""Random choices that all ranks, or one rank, can repeat: functions of seed, bucket and step, without a global generator."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.compressors.checks import check_integer
from horovod_sparse.exchange.protocols import Choice
from horovod_sparse.exchange.shared import SharedIndices
from horovod_sparse.ops.protocol import Array, Ops, Selection

_MANY = 16
"""If more than one number in `_MANY` is drawn, marking each number takes less time than sorting."""


def draw(seed: int, state: BucketState, *, shared: bool) -> int:
    """Draw a number of [0, 2^128) for this bucket's step: the same on all ranks if `shared`, otherwise each worker's own."""
    place = state.place
    key = repr((seed, place.bucket, state.step, None if shared else place.position))
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little")


def generator(seed: int, state: BucketState, *, shared: bool) -> np.random.Generator:
    """Return a generator whose key is what `draw` returns. To make one takes as long as a small bucket's selection."""
    return np.random.Generator(np.random.Philox(key=draw(seed, state, shared=shared)))


def distinct(draws: np.random.Generator, numel: int, k: int) -> NDArray[np.int64]:
    """Draw k different numbers of [0, numel), ascending; every set of k is equally likely."""
    if k > numel // 2:
        rest = np.ones(numel, bool)
        rest[distinct(draws, numel, numel - k)] = False
        return np.flatnonzero(rest)
    # Draw repeated numbers again. This is faster than a generator's own choice, most of all for a large k.
    if k > numel // _MANY:
        marked, found = np.zeros(numel, bool), 0
        while found < k:
            marked[draws.integers(numel, size=k - found)] = True
            found = int(np.count_nonzero(marked))
        return np.flatnonzero(marked)
    drawn = np.empty(0, np.int64)
    while len(drawn) < k:
        more = np.sort(draws.integers(numel, size=k - len(drawn)))
        # This sort merges runs that are already in order.
        drawn = np.sort(np.concatenate((drawn, more)), kind="stable")
        drawn = drawn[np.diff(drawn, prepend=-1) > 0]
    return drawn


@dataclass(eq=False, repr=False, kw_only=True)
class RandomCompressor(Compressor):
    """Base of compressors that choose entries at random: the same on all workers (only values are sent), or each its own.

    Args:
        seed: seed of the draws, an int >= 0, the same on all ranks. No other random generator is touched.
        exchange: with `SharedIndices()`, which None takes, all workers draw the same entries, with all others each its own.
        others: those of `Compressor`. Message capacity is exactly k.
    """

    default_exchange = SharedIndices()
    chooses: ClassVar[tuple[Choice, ...]] = ("own", "alike")
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("seed", self.seed, 0)
        super().__post_init__()

    @property
    def shared(self) -> bool:
        """Whether all workers draw the same entries."""
        return isinstance(self.exchange, SharedIndices)

    @abstractmethod
    def drawn(self, numel: int, k: int, state: BucketState) -> NDArray[np.int64]:
        """Draw k of `numel` entries, and return their indices, ascending: a function of seed, bucket and step."""

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        return Selection(ops.indices(self.drawn(len(x), k, state), x), k)
