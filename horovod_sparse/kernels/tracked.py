"""What the kernels note about a bucket's array while it takes in gradients, and answers from these notes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import ffi
from horovod_sparse.kernels.memory import TYPES, HostOps, Memory
from horovod_sparse.ops.cached import Above, Cached, narrow
from horovod_sparse.ops.protocol import EXTENT, SUMS, Array, Hints, Moving, Part, Selection, Sums

_NO_ROOM: NDArray[Any] = np.empty(0, np.int32)


class TrackedMemory(Cached):
    """Implements `ops.protocol.Tracked` for one contiguous array on the CPU.

    While the array takes in gradients, its sums are computed and its entries above a cut are copied. Questions that these
    can answer need no pass over the array. `above` has indices of int32 in NumPy's array.

    Args:
        ops: the framework's operations.
        x: the array, float32 or float64. It belongs to the caller.
        at: its memory.
    """

    _ops: HostOps

    def __init__(self, ops: HostOps, x: Array, at: Memory) -> None:
        super().__init__(ops, x)
        self._at = at
        self._values, self._indices = _NO_ROOM, _NO_ROOM
        """This step's memory for entries above the cut, and for their indices."""
        self._notes: Any = None
        """The `hs_notes` of this step; None outside of a step."""
        self._seen = 0
        """The number of elements of all parts that have taken in a gradient in this step."""
        self._parts: list[tuple[int, int, int]] = []
        """For each of these parts, as they came: its first index, and where its noted entries begin and end."""
        self._extent: Sums | None = None
        self._sums: Sums | None = None
        """What `extent` and `measure` say of the whole array; None if that is not known."""

    # --- gradients in ---

    def begin(self, hints: Hints) -> None:
        room = min(hints.room, self._at.numel) if hints.cut < math.inf else 0
        if room:
            # In one statement: a kernel must never write to memory of another size.
            self._values, self._indices = np.empty(room, TYPES[self._at.type]), np.empty(room, np.int32)
        values, indices = ffi.from_buffer("void *", self._values), ffi.from_buffer("int32_t *", self._indices)
        nothing = (0, 0.0, 0.0, 0.0, 0.0)
        self._notes = ffi.new("hs_notes *", (hints.cut, room, indices, values, hints.asks, nothing, 0, 1, 1))
        self._seen, self._parts = 0, []
        self.above = self._extent = self._sums = None

    def add(self, gradients: Sequence[Part], moving: Moving | None = None, rate: float = 1.0) -> list[int]:
        notes, not_finite = self._notes, []
        begin = notes.found if notes else 0
        parts = self._ops.add_noting(self._at, gradients, moving, rate, notes)
        if parts is None:
            self.forget()
            return self._ops.accumulate(self._x, gradients, moving, rate)
        for part in parts:
            not_finite.append(part.not_finite)
            self._parts.append((part.first, begin, part.found))
            self._seen += part.n
            begin = part.found
        if notes and notes.valid and self._seen == self._at.numel:
            self._conclude(notes)
        return not_finite

    def _conclude(self, notes: Any) -> None:
        """Keep what was noted: every part of the array has taken in a gradient, and no sum has left the range of the type."""
        if notes.wanted >= EXTENT:
            sums = notes.sums
            self._extent = Sums(sums.count, sums.total, sums.squares, sums.largest)
            self._sums = self._extent if notes.wanted == SUMS else None
        if notes.complete and notes.room:
            values, indices, parts = self._values[: notes.found], self._indices[: notes.found], sorted(self._parts)
            if parts != self._parts:
                values = np.concatenate([values[begin:end] for _, begin, end in parts])
                indices = np.concatenate([indices[begin:end] for _, begin, end in parts])
            self.above = Above(notes.cut, indices, self._ops.array(values))

    def forget(self) -> None:
        self._notes = self.above = self._extent = self._sums = None
        self._parts = []
        self._values, self._indices = _NO_ROOM, _NO_ROOM

    # --- answers ---

    def extent(self, x: Array) -> Sums:
        return self._extent if x is self._x and self._extent is not None else self._ops.extent(x)

    def measure(self, x: Array, threshold: float = 0.0, *, with_log: bool = False) -> Sums:
        if x is not self._x or threshold == 0.0:
            if x is self._x and self._sums is not None and not with_log:
                return self._sums
            return self._ops.measure(x, threshold, with_log=with_log)
        # The order and the number of entries decide how sums are rounded. So these are the same entries whether they were noted
        # or not: a resumed run, which has no notes in its first step, gets the same bits.
        if self.above is None or threshold != self.above.cut:
            return narrow(self, x, threshold).measure(x, threshold, with_log=with_log)
        return self._ops.measure(self.above.values, threshold, with_log=with_log)

    def _of(self, x: Array, among: Array, selection: Selection) -> Selection:
        if among is x:
            return selection
        assert self.above is not None
        indices = self.above.indices[np.asarray(selection.indices)].astype(np.int64)
        return selection._replace(indices=self._ops.array(indices))

    def sampled_largest(self, x: Array, start: int, stride: int, count: int) -> float:
        above = self.above if x is self._x else None
        # It takes longer to look at many notes than at the sample.
        if above is not None and len(above.indices) * stride <= len(x):
            sample = np.asarray(above.values)[(above.indices - start) % stride == 0]
            if len(sample) >= count:
                return self._ops.kth_largest(self._ops.array(sample), count)
        return self._ops.sampled_largest(x, start, stride, count)
