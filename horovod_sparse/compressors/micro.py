"""MiCRO: every worker selects from its own part of the bucket, with a threshold that follows the count."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from horovod_sparse.compressors.base import ALONE, BucketState, Compressor, Place
from horovod_sparse.compressors.checks import check_choice
from horovod_sparse.estimation.controllers import MOST_EXCESS, Scaling, next_threshold
from horovod_sparse.exchange.union import Union
from horovod_sparse.exchange.wire import LARGEST
from horovod_sparse.ops.protocol import Array, Ops, Selection


@dataclass
class MiCROState(BucketState):
    """What MiCRO saves is the same on all ranks, to the last bit."""

    saved: ClassVar[tuple[str, ...]] = ("current", "excess")
    ranges = BucketState.ranges | {"current": (0.0, LARGEST), "excess": (-MOST_EXCESS, MOST_EXCESS)}
    current: float = 0.0
    """Threshold of the next step; 0 until something has been selected."""
    excess: float = 0.0

    def rescale(self, factor: float) -> None:
        super().rescale(factor)
        self.current = min(self.current * factor, LARGEST)


@dataclass(eq=False, repr=False, kw_only=True)
class MiCRO(Compressor):
    """MiCRO (https://arxiv.org/abs/2310.00967): disjoint parts, a common threshold, and an allreduce at what was selected.

    The bucket is divided into P parts, one for each worker. In step t worker p selects the entries of part (t + p) mod P with
    `|u_i| > threshold`, and at least one entry. The indices are gathered, the values of all workers there are summed by
    allreduce, and all residuals become zero there. So a reduced gradient has k entries for any number of workers, and no
    entry is selected twice. Each rank proposes a threshold that selects its share of k entries, and the threshold starts at
    the mean of these. It then follows the count that all ranks have selected, without communication
    (`next_threshold`). If no rank has room for what exceeds the threshold, the threshold starts again.

    Args:
        ratio: fraction of entries that all workers together select, in (0, 1], or a schedule; at least one per worker.
        scaling: "two_sided": the threshold moves up and down, and if too many entries were selected, fewer are selected later.
            "paper": the published rule (`next_threshold`), which ends at about 0.94 k. The threshold is too low while
            residuals grow, in the first hundreds of steps: up to 12 k entries exceed it at ratio 0.01, up to 63 k at 0.001.
        others: those of `Compressor`. A rank's message has room for 2k/P entries unless `slack` says otherwise.
    """

    default_slack = 2.0
    default_exchange = Union()
    chooses = ()

    scaling: Scaling = "two_sided"

    def __post_init__(self) -> None:
        check_choice("scaling", self.scaling, ("two_sided", "paper"))
        super().__post_init__()

    def new_state(self, place: Place = ALONE) -> MiCROState:
        return MiCROState(place)

    def message_capacity(self, numel: int, k: int, world: int) -> int:
        """Return the capacity of one rank's message in entries: its share of slack * k, at most the largest part."""
        return min(math.ceil(numel / world), math.ceil(self.slack * k / world))

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        assert isinstance(state, MiCROState)
        start, end = self.part(state, len(x))
        state.threshold = state.current
        # The threshold that would have selected this rank's share, if there is no common one yet or it was far too low.
        state.proposal = 0.0
        if start == end:
            return Selection(ops.select_above(x[:0], 0.0, 1).indices, 0)
        mine, share = x[start:end], self.share(state, k, capacity, end - start)
        if state.current == 0.0:
            state.proposal = ops.kth_largest(mine, share)
            selection = ops.select_above(mine, 0.0, share)
        else:
            selection = ops.select_above(mine, state.current, capacity)
        if selection.found > capacity and self.scaling == "two_sided":
            state.proposal = ops.kth_largest(mine[selection.indices], share)
        if selection.found == 0:
            # Select at least one entry, so that a threshold that is far too high does not starve the bucket.
            selection = ops.select_largest(mine, 1)
        return Selection(selection.indices + start, selection.found)

    # --- what the host and a device have in common ---

    def part(self, state: BucketState, numel: int) -> tuple[int, int]:
        """Return where this worker's part of `numel` entries begins and ends in this step."""
        place = state.place
        number = (state.step + place.position) % place.world
        return numel * number // place.world, numel * (number + 1) // place.world

    def share(self, state: BucketState, k: int, capacity: int, size: int) -> int:
        """Return how many entries this worker should select from a part of this size."""
        return min(max(1, round(k / state.place.world)), capacity, size)

    def observe(self, state: BucketState, count: int, k: int, proposed: list[float]) -> None:
        assert isinstance(state, MiCROState)
        if state.current == 0.0 or all(proposal > 0.0 for proposal in proposed):
            # Ranks whose part is empty or all zero propose nothing.
            positive = [proposal for proposal in proposed if proposal > 0.0]
            state.current = sum(positive) / max(len(positive), 1)
        else:
            # Every worker selects at least one entry. If there are more than k workers, their number is the aim.
            aim = max(k, state.place.world)
            following, state.excess = next_threshold(self.scaling, state.current, state.excess, count, aim)
            state.current = min(following, LARGEST)
