"""MiCRO: every worker selects from its own part of the bucket, by a threshold that follows the count."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from horovod_sparse import exchanges
from horovod_sparse.compressors.base import ALONE, BucketState, Compressor, Place, Settings, check_choice
from horovod_sparse.exchanges import Exchange
from horovod_sparse.ops import Array, Ops, Selection
from horovod_sparse.schedules import Schedule
from horovod_sparse.stages import MOST_EXCESS, Scaling, ThresholdController
from horovod_sparse.wire import LARGEST

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class MiCROState(BucketState):
    """The same on all ranks, to the last bit."""

    saved: ClassVar[tuple[str, ...]] = ("current", "excess")
    ranges = BucketState.ranges | {"current": (0.0, LARGEST), "excess": (-MOST_EXCESS, MOST_EXCESS)}
    current: float = 0.0
    """Threshold of the next step; 0 until something was selected."""
    excess: float = 0.0
    """See `ThresholdController`."""
    parts: int = 1
    """Of the bucket, that are not empty."""

    def rescale(self, factor: float) -> None:
        super().rescale(factor)
        self.current = min(self.current * factor, LARGEST)


class MiCRO(Compressor):
    """MiCRO (https://arxiv.org/abs/2310.00967): disjoint parts, a common threshold, and an allreduce at what was selected.

    The bucket is divided into as many parts as there are workers, P; in step t worker p selects `|u_i| > threshold`, and at
    least one entry, from part (t + p) mod P. Indices are gathered, all workers' values there are summed by allreduce,
    and all residuals become zero there. So a reduced gradient has k entries however many workers there are, and none is
    selected twice. The threshold starts at the ranks' mean of what selects k entries, and then follows the count that
    all ranks have selected, without communication (`ThresholdController`). When no rank has room for what exceeds it,
    it starts again.

    Args:
        ratio: fraction of entries that all workers together select, in (0, 1], or a schedule; at least one per worker.
        scaling: "two_sided": the threshold moves up and down, and what was selected too much is selected less later;
            "paper": within 10 % of k it only moves up, which ends at about 0.94 k, and beyond the band it moves by 0.5 % only:
            while residuals grow, in the first hundreds of steps, it is too low. On Laplace gradients up to 12 k entries
            exceed it at ratio 0.01, 63 k at 0.001.
        others: those of `Compressor`. A rank's message has room for 2k/P entries unless `capacity` says otherwise. That hides
            how the paper's rule begins: the threshold takes the same way, but at most 2k entries are sent.
    """

    default_capacity = 2.0

    def __init__(
        self, ratio: float | Schedule, *, scaling: Scaling = "two_sided", **settings: Unpack[Settings]
    ) -> None:
        super().__init__(ratio, **settings)
        check_choice("scaling", scaling, ("two_sided", "paper"))
        self.scaling: Scaling = scaling

    @property
    def exchange(self) -> Exchange:
        return exchanges.union

    def new_state(self, place: Place = ALONE) -> MiCROState:
        return MiCROState(place)

    def room(self, numel: int, k: int, world: int) -> int:
        """Entries of one rank's message: its share of capacity * k, at least one, at most the largest part."""
        return min(math.ceil(numel / world), math.ceil(self.capacity * k / world))

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        assert isinstance(state, MiCROState)
        place = state.place
        start, end = part(len(x), place.world, (state.step + place.position) % place.world)
        state.threshold = state.current
        # What would have selected this rank's share, where there is no common threshold yet or it was far too low.
        state.proposal = 0.0
        state.parts = min(place.world, len(x))
        if start == end:
            return Selection(ops.select_above(x[:0], 0.0, 1).indices, 0)
        mine = x[start:end]
        share = min(max(1, round(k / place.world)), capacity)
        if state.current == 0.0:
            state.proposal = ops.kth_largest(mine, share)
            selection = ops.select_above(mine, 0.0, share)
        else:
            selection = ops.select_above(mine, state.current, capacity)
        if selection.found > capacity and self.scaling == "two_sided":
            state.proposal = ops.kth_largest(mine[selection.indices], share)
        if selection.found == 0:
            # One entry at least, so that a threshold that is far too high does not starve the bucket.
            selection = ops.select_largest(mine, 1)
        return Selection(selection.indices + start, selection.found)

    def observe(self, state: BucketState, count: int, k: int, proposed: list[float]) -> None:
        assert isinstance(state, MiCROState)
        if state.current == 0.0 or all(proposal > 0.0 for proposal in proposed):
            # Ranks whose part is empty or zero have nothing to propose.
            positive = [proposal for proposal in proposed if proposal > 0.0]
            state.current = sum(positive) / max(len(positive), 1)
        else:
            controller = ThresholdController(self.scaling, state.current, state.excess)
            # Every worker that has a part selects at least one entry: with more workers than k that is what is aimed at.
            controller.observe(count, max(k, state.parts))
            state.current, state.excess = min(controller.threshold, LARGEST), controller.excess


def part(numel: int, world: int, number: int) -> tuple[int, int]:
    """First index and end of one of `world` parts; the first `numel mod world` parts have one entry more."""
    size, longer = divmod(numel, world)
    start = number * size + min(number, longer)
    return start, start + size + (number < longer)
