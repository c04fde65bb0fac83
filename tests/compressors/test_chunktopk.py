"""ChunkTopK: every chunk sends its share."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_sparse.compressors import ChunkTopK
from horovod_sparse.numpy.ops import NumpyOps
from tests.harness.table import gradients

OPS = NumpyOps()


# --- ChunkTopK ---


@pytest.mark.parametrize("size", [1, 300, 4096, 4 * 4096, 3 * 4096 + 77, 100_000])
@pytest.mark.parametrize("ratio", [1.0, 1 / 64, 0.01, 0.0004, 1e-5])
def test_every_chunk_sends_its_share(size: int, ratio: float) -> None:
    """So it leaves no more than what the chunk that sends the fewest may leave, wherever the large entries are."""
    compressor = ChunkTopK(ratio, warmup=None)
    k = compressor.target_count(size)
    length = next(length for length in 4096 * 2 ** np.arange(9) if length * k >= size)
    first = np.where(np.arange(size) < length, 3.0, 0.1).astype(np.float32)
    for x in (gradients("laplace", size, np.random.default_rng(1)), np.ones(size, np.float32), first):
        indices = compressor.select(OPS, x, k, k, compressor.new_state()).indices
        counts = np.bincount(indices // length, minlength=-(-size // length))
        assert counts.sum() == k and counts.min() > 0 and np.ptp(counts[: size // length] if size >= length else 0) <= 1
        mine = indices[: counts[0]]
        assert np.abs(x[mine]).min() >= np.delete(np.abs(x[:length]), mine).max(initial=0.0)
        left = 1 - np.square(x[indices], dtype=float).sum() / np.square(x, dtype=float).sum()
        assert left <= 1 - length * k // size / length + 1e-6
    assert ratio != 1 / 64 or size % 4096 or set(counts) == {64}, "as SparseLoCo does"
