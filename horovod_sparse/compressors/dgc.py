"""Deep Gradient Compression: a threshold from a sample, momentum before the selection."""

from __future__ import annotations

import math
from dataclasses import dataclass

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.compressors.checks import check_fraction, check_integer
from horovod_sparse.compressors.draws import generator
from horovod_sparse.estimation import fits
from horovod_sparse.ops.protocol import Array, Ops, Selection

TOO_FEW, TOO_MANY = 0.8, 1.3
_MOST_ADAPTATIONS = 10


@dataclass(eq=False, repr=False, kw_only=True)
class DGC(Compressor):
    """Deep Gradient Compression (https://arxiv.org/abs/1712.01887): sampled top-k, with `momentum` of the accumulated velocity.

    `U = m U + G; V = V + U`. The threshold eta is the (ratio n)-th largest of n sampled magnitudes of V. Entries that
    exceed eta are sent and become zero in V and U (momentum factor masking). If more than 1.3 k entries exceed eta, the
    exact top-k of them is sent. If fewer than 0.8 k do, eta is lowered by the factor 0.8, at most 10 times.

    The paper's whole method is `DGC(0.001, momentum=0.9)`, and an optimizer without momentum. Without `momentum` this is
    sampled top-k with error feedback.

    Args:
        sample_ratio: fraction of the entries that is sampled, in (0, 1]; at least 2/ratio entries are sampled.
        seed: seed of the sample's random start, an int >= 0.
        others: those of `Compressor`. Message capacity is 1.3 k unless `slack` says otherwise.
    """

    default_slack = TOO_MANY

    sample_ratio: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        check_fraction("sample_ratio", self.sample_ratio)
        check_integer("seed", self.seed, 0)
        self.sample_ratio = float(self.sample_ratio)
        super().__post_init__()

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        threshold = ops.sampled_largest(x, *self.sample(len(x), k, state))
        selection = ops.select_above(x, threshold, capacity)
        if selection.found < TOO_FEW * k and threshold > 0.0:
            # What a lower threshold selects is among these, or is too much.
            top = ops.select_largest(x, min(math.floor(TOO_MANY * k) + 1, len(x)))
            few = x[top.indices]
            for _ in range(_MOST_ADAPTATIONS):
                threshold *= TOO_FEW
                selection = ops.select_above(few, threshold, capacity)
                if selection.found >= TOO_FEW * k or threshold == 0.0:
                    break
            if selection.found == 0:
                threshold = fits.below_largest(ops.measure(x).largest, threshold)
                selection = ops.select_above(few, threshold, capacity)
            selection = selection._replace(indices=top.indices[selection.indices])
        state.threshold = threshold
        if selection.found <= TOO_MANY * k:
            state.expect(threshold)
            return selection
        # Hierarchical selection: the exact top-k, searched only among the entries above the threshold.
        values = x[selection.indices]
        among = ops.select_largest(values, k)
        state.expect(among.smallest)
        return Selection(selection.indices[among.indices], k)

    def sample(self, numel: int, k: int, state: BucketState) -> tuple[int, int, int]:
        """Return random start and stride of the sample, and how many of its entries should exceed the threshold."""
        size = max(math.ceil(self.sample_ratio * numel), math.ceil(2 * numel / k))
        # The stride is odd, so that it does not lock on to the rows of a layer.
        stride = max(1, (numel // size - 1) | 1)
        start = int(generator(self.seed, state, shared=False).integers(stride))
        return start, stride, max(1, round(len(range(start, numel, stride)) * k / numel))
