"""What the kernels note about a bucket's array while it takes in gradients, and answers from these notes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import ffi, memory, pool
from horovod_sparse.kernels.memory import TYPES, HostOps, Memory
from horovod_sparse.ops.cached import Above, Cached, narrow
from horovod_sparse.ops.protocol import EXTENT, SUMS, Array, Hints, Moving, Part, Selection, Sums

_KEPT = 2**12
"""Memory for at most this many entries is kept from step to step: borrowing it takes longer than using it."""


class TrackedMemory(Cached):
    """Implements `ops.protocol.Tracked` for one contiguous array on the CPU.

    While the array takes in gradients, its sums are computed and its entries above a cut are copied. Questions that these
    can answer need no pass over the array.

    Args:
        ops: the framework's operations.
        x: the array, float32 or float64. It belongs to the caller.
        at: its memory.
    """

    _ops: HostOps

    def __init__(self, ops: HostOps, x: Array, at: Memory) -> None:
        super().__init__(ops, x)
        self._residual = at.write()
        _, code, self._numel = self._residual
        self._type = TYPES[code]
        self._room = self._no_room()
        """Memory for entries above the cut, and for their indices."""
        self._notes: Any = None
        """The `hs_notes` of this step; None outside of a step, or if nothing is known."""
        self._seen = 0
        """The number of elements of all parts that have taken in a gradient in this step."""
        self._parts: list[tuple[int, int, int]] = []
        """For each of these parts, as they came: its first index, and where its noted entries begin and end."""

    def _no_room(self) -> tuple[NDArray[Any], NDArray[Any]]:
        return np.empty(0, self._type), np.empty(0, np.int32)

    # --- gradients in ---

    def begin(self, hints: Hints) -> None:
        room = min(hints.room, self._numel) if hints.cut < math.inf else 0
        if room > len(self._room[0]):
            rounded = 1 << (room - 1).bit_length()
            # In one statement: a kernel must never write to memory of another size.
            self._room = pool.lend(rounded, self._type), pool.lend(rounded, "int32")
        values, indices = ffi.from_buffer("void *", self._room[0]), ffi.from_buffer("int32_t *", self._room[1])
        nothing = (0, 0.0, 0.0, 0.0, 0.0)
        noted = (hints.cut, room, indices, values, hints.asks, nothing, 0, 1, 1)
        self._notes, self._above = ffi.new("hs_notes *", noted), None
        self._seen, self._parts = 0, []

    def take_in(self, gradients: Sequence[Part], moving: Moving | None = None, rate: float = 1.0) -> list[int]:
        notes, self._above = self._notes, None
        begin = 0 if notes is None else notes.found
        taken = memory.take_in(self._ops, self._residual, gradients, moving, rate, notes)
        if taken is None:
            self.forget()
            return self._ops.accumulate(self._x, gradients, moving, rate)
        if notes is not None:
            for part in taken:
                self._seen += part.n
                self._parts.append((part.first, begin, part.found))
                begin = part.found
        return [part.not_finite for part in taken]

    def forget(self) -> None:
        super().forget()
        self._notes, self._parts = None, []
        if len(self._room[0]) > _KEPT:
            # All buckets use the same memory, one after the other.
            self._room = self._no_room()

    # --- what was noted ---

    def known(self, asked: int) -> Sums | None:
        """What was asked of the whole array; None if that was not expected, or if some part has taken in nothing."""
        return memory.sums_of(self._notes.sums) if self._complete() and self._notes.wanted >= asked else None

    @property
    def above(self) -> Above | None:
        """All entries above the cut, with indices of int32 in NumPy's array. They hold until the next step begins.

        None if some part has taken in nothing, if a sum left the range of the type, or if there was no room.
        """
        notes = self._notes
        if self._above is None and self._complete() and notes.complete and notes.room:
            values, indices = (array[: notes.found] for array in self._room)
            if self._parts != sorted(self._parts):
                places = [slice(begin, end) for _, begin, end in sorted(self._parts)]
                values, indices = (np.concatenate([one[place] for place in places]) for one in (values, indices))
            self._above = Above(notes.cut, indices, self._ops.array(values))
        return self._above

    def _complete(self) -> bool:
        """Return whether every part of the array has taken in a gradient, and no sum has left the range of the type."""
        return self._notes is not None and self._seen == self._numel and bool(self._notes.valid)

    # --- answers ---

    def extent(self, x: Array) -> Sums:
        return (self.known(EXTENT) if x is self._x else None) or self._ops.extent(x)

    def measure(self, x: Array, threshold: float = 0.0, *, with_log: bool = False) -> Sums:
        if x is not self._x or threshold == 0.0:
            sums = self.known(SUMS) if x is self._x and not with_log else None
            return sums or self._ops.measure(x, threshold, with_log=with_log)
        # The order and the number of entries decide how sums are rounded. So these are the same entries whether they were noted
        # or not: a resumed run, which has no notes in its first step, gets the same bits.
        above = self.above
        if above is None or threshold != above.cut:
            return narrow(self, x, threshold).measure(x, threshold, with_log=with_log)
        return self._ops.measure(above.values, threshold, with_log=with_log)

    def select_above(self, x: Array, threshold: float, capacity: int) -> Selection:
        above = self.above if x is self._x else None
        if above is None or threshold < above.cut:
            return self._ops.select_above(x, threshold, capacity)
        # Of all that were noted, few are selected: only their indices are widened.
        return self._ops.select_named(above.values, above.indices, threshold, capacity)

    def _of(self, x: Array, among: Array, selection: Selection) -> Selection:
        if among is x:
            return selection
        assert self._above is not None
        indices = self._above.indices[np.asarray(selection.indices)].astype(np.int64)
        return selection._replace(indices=self._ops.array(indices))

    def sampled_largest(self, x: Array, start: int, stride: int, count: int) -> float:
        above = self.above if x is self._x else None
        if above is not None:
            sample = np.asarray(above.values)[(above.indices - start) % stride == 0]
            if len(sample) >= count:
                return self._ops.kth_largest(self._ops.array(sample), count)
        return self._ops.sampled_largest(x, start, stride, count)
