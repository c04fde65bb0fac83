"""Exact top-k."""

from __future__ import annotations

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.ops import Array, Ops, Selection


class TopK(Compressor):
    """The k entries of largest magnitude; among equal magnitudes the lowest indices.

    `||u - TopK(u)||^2 <= (1 - k/d) ||u||^2` (Definition 2.1 of https://arxiv.org/abs/1809.07599).
    With the residual this is Sparsified SGD with Memory. Exact, but the search for the k-th largest is dear.

    Args: those of `Compressor`. Message room is exactly k unless `capacity` says otherwise.
    """

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        return ops.select_largest(x, k)
