"""Exact top-k. Tested by tests/compressors/test_laws.py."""

from __future__ import annotations

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.ops.protocol import Array, Ops, Selection


class TopK(Compressor):
    """Selects the k entries of largest magnitude; among equal magnitudes those with the lowest indices.

    `||u - TopK(u)||^2 <= (1 - k/d) ||u||^2` (Definition 2.1 of https://arxiv.org/abs/1809.07599). With `lr_in_residual=True`
    and an optimizer without momentum this is Sparsified SGD with Memory.

    Args:
        others: those of `Compressor`. Message capacity is exactly k unless `slack` says otherwise.
    """

    chooses = ("own", "largest")

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        selection = ops.select_largest(x, k)
        state.expect(selection.smallest)
        return selection
