"""The part of a bucket that this rank owns, in exchanges where ranks own parts (`exchange.owners`). Imports no framework."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.core.selector import Outcome
from horovod_sparse.exchange import regions, wire
from horovod_sparse.exchange.grid import Grid
from horovod_sparse.exchange.protocols import Sender
from horovod_sparse.ops.protocol import Array, Selection


class Region(NamedTuple):
    """What this rank owns of a bucket during an exchange. The arrays are copies."""

    place: slice
    before: Array | None = None
    """Its values when the exchange began, if the buffer does not hold them."""
    after: Array | None = None
    """Its values when the step succeeds."""


class Owner(Sender):
    """A bucket, as far as it concerns the part that this rank owns."""

    compressor: Compressor
    state: BucketState
    buffer: Array
    sparse_step: int
    """Number of this step, counted from the first that is not one of the dense steps."""
    target: int
    """How many entries this rank is to send in this step."""
    outcome: Outcome
    known_grid: Grid | None
    """The hosts and slots of the workers, with `hierarchical`."""
    own_region: Region | None
    """What this rank owns of the bucket in this step."""
    masked: list[Array] | None
    """Indices of entries whose velocity is masked, if these are not the entries that were taken."""

    @abstractmethod
    def select_some(self, k: int, capacity: int) -> Selection:
        """Return what the compressor selects from the buffer, about k entries."""

    @abstractmethod
    def taken_indices(self) -> list[Array]:
        """Return the indices of what was taken; none if everything was."""

    @abstractmethod
    def forget(self) -> None:
        """Forget what was seen of the buffer, because it no longer applies."""

    @property
    def bounds(self) -> list[int]:
        # Another number of workers or another bucket may have saved them.
        return regions.fitting(self.state.bounds, self.numel, self.world)

    def message_to_regions(self, room: int) -> Array:
        bounds = self.bounds
        place = slice(bounds[self.position], bounds[self.position + 1])
        self.own_region = Region(place, self.ops.copy(self.buffer[place]))
        # The owner knows all of its region. What it sends is for the others.
        self.buffer[place] = 0
        self.forget()
        k = regions.to_others(self.k, self.world)
        capacity = self.compressor.message_capacity(self.numel, k, self.world)
        selection = self.select_some(k, capacity) if k else Selection(self._no_indices(), 0)
        indices, counts = self.ops.fit(self.buffer, selection.indices, bounds, room)
        self.sent(len(indices), selection.found - len(indices))
        return self.ops.pack_regions(indices, self.take(indices), bounds, counts, room)

    def region(self) -> Array:
        assert self.own_region is not None and self.own_region.before is not None
        return self.ops.copy(self.own_region.before)

    def forward(self, region: Array, most: int) -> Array:
        assert self.own_region is not None
        first, count = self.own_region.place.start, min(most, len(region))
        indices = self.ops.select_largest(region, count).indices if count else self._no_indices()
        values = self.ops.take(region, indices)
        self.own_region = self.own_region._replace(after=region)
        self.masked = [*self.taken_indices(), indices + first]
        self.sent(self.outcome.sent + count, self.outcome.truncated)
        return self.ops.pack(indices + first, values, most + 1)

    def balance(self, counts: list[int]) -> None:
        self.state.bounds = regions.balanced(self.bounds, counts, regions.gain(self.sparse_step))

    @property
    def grid(self) -> Grid:
        assert self.known_grid is not None
        return self.known_grid

    def message_of_shard(self, received: Array | None) -> Array:
        grid, bounds = self.grid, self.grid.shards(self.numel)
        first, after = bounds[grid.slot], bounds[grid.slot + 1]
        parts = [] if received is None else received.reshape(grid.slots, after - first)
        shard = self.ops.copy(self.buffer[first:after])
        # The first part is added like the others: it may hold NaN, which must not reach the residual.
        shard[:] = 0
        overflows = [self.ops.accumulate(shard, [(0, part)]) for part in parts if len(part)]
        k = regions.forwarded(self.k, grid.slots)
        # All slots have room for as many.
        capacity = self.compressor.message_capacity(-(-self.numel // grid.slots), k, self.world)
        selection = Selection(self._no_indices(), 0)
        is_finite = received is not None and self.finite and not any(map(any, overflows))
        if len(shard) and is_finite:
            most = min(capacity, len(shard))
            selection = self.compressor.choose(self.ops, shard, min(k, most), most, self.state)
        self.own_region, self.target = Region(slice(first, after), after=shard), k
        self.sent(len(selection.indices), selection.found - len(selection.indices))
        message = self.ops.pack(selection.indices + first, self.ops.take(shard, selection.indices), capacity)
        if not is_finite:
            message[0, 0] = wire.NOT_FINITE
        return message

    def host_sent(self, indices: Sequence[Array]) -> None:
        self.masked = [*indices]

    def _no_indices(self) -> Array:
        return self.ops.indices(np.empty(0, np.int64), self.buffer)
