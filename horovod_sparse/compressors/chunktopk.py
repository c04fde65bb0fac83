"""The largest entries of every chunk."""

from __future__ import annotations

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.exchange.wire import CHUNK
from horovod_sparse.ops.protocol import Array, Ops, Selection


class ChunkTopK(Compressor):
    """Selects the entries of largest magnitude in each chunk of 4,096, as SparseLoCo does (https://arxiv.org/abs/2508.15706).

    Of d entries, the chunk [a, b) sends `floor(b k/d) - floor(a k/d)`: all chunks together k, and two whole ones equally many
    but for one. Among equal magnitudes those with the lowest indices are sent, and zeros never. As long as a whole chunk of L
    entries would send none, L is doubled. `||u - C(u)||^2 <= (1 - floor(L k/d)/L) ||u||^2`.

    Args:
        others: those of `Compressor`. Message capacity is exactly k unless `slack` says otherwise.
    """

    chooses = ("own", "largest")

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        length = CHUNK
        while length * k < len(x):
            length *= 2
        return ops.select_in_chunks(x, length, k)
