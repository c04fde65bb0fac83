"""What the kernels note about a bucket's array while it takes in gradients, and answers from these notes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import ffi, lib, memory, pool
from horovod_sparse.kernels.memory import TYPES, Block, HostOps, Memory
from horovod_sparse.ops.cached import Above, narrow
from horovod_sparse.ops.protocol import Array, Hints, Moving, Part, Selection, Sums

_KEPT = 2**12
"""Memory for at most this many entries is kept from step to step: borrowing it takes longer than using it."""


class TrackedMemory:
    """Implements `ops.protocol.Tracked` for one contiguous array on the CPU.

    While the array takes in gradients, its sums are computed and its entries above a cut are copied. Questions that these
    can answer need no pass over the array.

    Args:
        ops: the framework's operations.
        x: the array, float32 or float64. It belongs to the caller.
        at: its memory.
    """

    def __init__(self, ops: HostOps, x: Array, at: Memory) -> None:
        self._ops = ops
        self._x = x
        self._residual = at.write()
        _, self._type, self._numel = self._residual
        self._notes: Any = None
        """The `hs_notes` of this step; None outside of a step, or if nothing is known."""
        self._seen = 0
        """The number of elements of all parts that have taken in a gradient in this step."""
        self._groups: list[tuple[int, Any]] = []
        """For each group of gradients: how many entries above the cut there were before it, and the gradients."""
        self._in_order = False
        """Whether the entries above the cut have the order of the array. The parts may have come in another one."""
        self._give_back()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def _make_room(self, room: int) -> None:
        """Provide memory for at least `room` entries. Memory that is not written to costs nothing."""
        room = 1 << (room - 1).bit_length()
        self._hold(pool.lend(room, TYPES[self._type]), pool.lend(room, "int32"))

    def _give_back(self) -> None:
        self._hold(np.empty(0, TYPES[self._type]), np.empty(0, np.int32))

    def _hold(self, values: NDArray[Any], indices: NDArray[Any]) -> None:
        """Use this memory for entries that are noted, and for their indices."""
        addresses = ffi.from_buffer("void *", values), ffi.from_buffer("int32_t *", indices)
        # In one statement: a kernel must never write to memory of another size.
        self._values, self._indices, (self._at_values, self._at_indices) = values, indices, addresses

    # --- gradients in ---

    def begin(self, hints: Hints) -> None:
        room = min(hints.room, self._numel) if hints.cut < math.inf else 0
        if room > len(self._values):
            self._make_room(room)
        nothing = (0, 0.0, 0.0, 0.0, 0.0)
        noted = (hints.cut, room, self._at_indices, self._at_values, hints.sums, nothing, 0, 1, 1)
        self._notes = ffi.new("hs_notes *", noted)
        self._seen, self._groups, self._in_order = 0, [], False

    def take_in(self, gradients: Sequence[Part], moving: Moving | None = None, rate: float = 1.0) -> list[int]:
        given = memory.gradients_of(self._ops, gradients)
        if given is None:
            self.forget()
            return self._ops.accumulate(self._x, gradients, moving, rate)
        notes, before = self._notes, 0 if self._notes is None else self._notes.found
        bad = memory.take_in(self._ops, self._residual, given, moving, rate, notes)
        if notes is not None:
            self._seen += given.numel
            self._groups.append((before, given.parts))
        return bad

    def forget(self) -> None:
        self._notes = None
        self._groups = []
        if len(self._values) > _KEPT:
            # All buckets use the same memory, one after the other.
            self._give_back()

    # --- what was noted ---

    @property
    def sums(self) -> Sums | None:
        """The sums of the whole array; None if they were not wanted, or if some part has taken in nothing."""
        return memory.sums_of(self._notes.sums) if self._complete() and self._notes.with_sums else None

    @property
    def above(self) -> Above | None:
        """All entries above the cut, in this object's memory.

        None if some part has taken in nothing, if a sum left the range of the type, or if there was no room.
        """
        notes = self._notes
        if not (self._complete() and notes.complete and notes.room):
            return None
        self._put_in_order()
        return Above(notes.cut, self._indices[: notes.found], self._values[: notes.found])

    # --- answers ---

    def measure(self, x: Array, threshold: float = 0.0, *, with_log: bool = False) -> Sums:
        if x is not self._x or threshold == 0.0:
            sums = self.sums if x is self._x and not with_log else None
            return sums or self._ops.measure(x, threshold, with_log=with_log)
        # The order and the number of entries decide how sums are rounded. So these are the same entries whether they were noted
        # or not: a resumed run, which has no notes in its first step, gets the same bits.
        if not self._exceeding(x, threshold) or threshold > self._notes.cut:
            return narrow(self, x, threshold).measure(x, threshold, with_log=with_log)
        self._put_in_order()
        return memory.measure(self._noted(), threshold, with_log, self._ops.threads())

    def count(self, x: Array, threshold: float) -> int:
        if not self._exceeding(x, threshold):
            return self._ops.count(x, threshold)
        return int(lib.hs_count(*self._noted(), threshold, self._ops.threads()))

    def select_above(self, x: Array, threshold: float, capacity: int) -> Selection:
        if not self._exceeding(x, threshold):
            return self._ops.select_above(x, threshold, capacity)
        self._put_in_order()
        picked = np.empty(self._notes.found, np.int64)
        pointer = ffi.from_buffer("int64_t *", picked)
        picked = picked[: lib.hs_pick_above(self._at_indices, *self._noted(), threshold, pointer)]
        if len(picked) > capacity:
            return self.select_largest(x, capacity)._replace(found=len(picked), smallest=math.nan)
        return Selection(self._ops.array(picked), len(picked))

    def select_largest(self, x: Array, count: int) -> Selection:
        above = self.above if x is self._x else None
        if above is None or len(above.values) < count:
            return self._ops.select_largest(x, count)
        magnitudes = np.abs(above.values)
        smallest = _kth_largest(magnitudes, count)
        chosen = magnitudes >= smallest
        surplus = int(np.count_nonzero(chosen)) - count
        if surplus:
            # Among equals, those with the lowest indices are selected.
            chosen[np.flatnonzero(magnitudes == smallest)[-surplus:]] = False
        return Selection(self._ops.array(above.indices[chosen].astype(np.int64)), count, smallest)

    def sampled_largest(self, x: Array, start: int, stride: int, count: int) -> float:
        above = self.above if x is self._x else None
        if above is not None:
            sample = above.values[(above.indices - start) % stride == 0]
            if len(sample) >= count:
                return _kth_largest(np.abs(sample), count)
        return self._ops.sampled_largest(x, start, stride, count)

    def _complete(self) -> bool:
        """Return whether every part of the array has taken in a gradient, and no sum has left the range of the type."""
        return self._notes is not None and self._seen == self._numel and bool(self._notes.valid)

    def _noted(self) -> Block:
        """Return the entries that were noted, as kernels take them."""
        return self._at_values, self._type, self._notes.found

    def _exceeding(self, x: Array, threshold: float) -> bool:
        """Return whether all entries of x above the threshold were noted."""
        notes = self._notes
        return x is self._x and self._complete() and bool(notes.complete and notes.room and threshold >= notes.cut)

    def _put_in_order(self) -> None:
        """Put the entries above the cut into the order of the array."""
        if self._in_order:
            return
        self._in_order = True
        parts = []
        for begin, gradients in self._groups:
            for gradient in gradients:
                parts.append((gradient.first, begin, gradient.found))
                begin = gradient.found
        if any(one[0] > other[0] for one, other in itertools.pairwise(parts)):
            order = np.concatenate([np.arange(begin, end) for _, begin, end in sorted(parts)])
            for array in (self._values, self._indices):
                array[: len(order)] = array[order]


def _kth_largest(magnitudes: NDArray[Any], count: int) -> float:
    place = magnitudes.size - count
    return float(np.partition(magnitudes, place)[place])
