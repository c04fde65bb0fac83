"""Random numbers that all ranks, or one rank, can draw again: a function of seed, bucket and step. Never a global generator."""

from __future__ import annotations

import hashlib

import numpy as np

from horovod_sparse.compressors.base import BucketState


def generator(seed: int, state: BucketState, *, shared: bool) -> np.random.Generator:
    """A generator for this bucket's step: the same on all ranks, or each worker's own."""
    place = state.place
    key = repr((seed, place.bucket, state.step, None if shared else place.position))
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)))
