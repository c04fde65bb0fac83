"""The array operations with compiled kernels, for arrays of any framework in the host's memory. Imports no framework."""

# mypy: disable-error-code="safe-super"
# The methods of `super()` are those of the framework's operations, from which the adapter's class derives too.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from horovod_sparse.exchange.wire import chunks_of, packed_length, packed_room
from horovod_sparse.kernels import ffi, lib, pool
from horovod_sparse.kernels.memory import FLOAT16, FLOAT32, FLOAT64, INT32, INT64, TYPES, HostOps, Memory
from horovod_sparse.kernels.tracked import TrackedMemory
from horovod_sparse.ops.protocol import Array, Moved, Moving, Part, Selection, Sums, Tracked


class KernelOps(HostOps):
    """Implements `ops.protocol.Ops` by kernels. Selects the same entries as the framework's operations.

    An adapter's class derives from this one and from the framework's operations. Those do what kernels cannot: arrays on other
    devices, arrays of other types, and the operations that are not here.
    """

    def _wide(self, x: Array, *, written: bool = False) -> Memory | None:
        """Return the memory of a residual; None if it is left to the framework's operations.

        Raise ValueError if it is to be `written` to, and is read-only or a copy.
        """
        at = self.memory(x)
        if at is None or at.type > FLOAT64:
            return None
        if written and not at.writable:
            raise ValueError(
                f"the array that a kernel writes to must be contiguous, aligned and writable, got one of {at.numel} "
                "elements that is not"
            )
        return at

    # --- gradients in ---

    def tracked(self, x: Array) -> Tracked:
        at = self._wide(x)
        return super().tracked(x) if at is None or not at.writable else cast(Tracked, TrackedMemory(self, x, at))

    def accumulate(
        self, buffer: Array, gradients: Sequence[Part], moving: Moving | None = None, rate: float = 1.0
    ) -> list[int]:
        at = self._wide(buffer, written=True)
        parts = None if at is None else self.add_noting(at, gradients, moving, rate)
        if parts is None:
            return super().accumulate(buffer, gradients, moving, rate)
        return [part.not_finite for part in parts]

    def add_noting(
        self, residual: Memory, gradients: Sequence[Part], moving: Moving | None, rate: float, notes: Any = None
    ) -> Any | None:
        given: list[tuple[Any, ...]] = []
        owners: list[object] = []
        for first, gradient in gradients:
            moved = gradient if isinstance(gradient, Moved) else None
            if moved is not None and moving is not None:
                return None
            at = self.memory(gradient if moved is None else moved.now)
            if at is None or at.type > FLOAT16:
                return None
            place = ffi.cast("uintptr_t", at.pointer), at.type, first, at.numel
            # Contiguous copies live as long as their memory is used.
            owners.append(at.owner)
            if moved is None:
                given.append(place)
                continue
            start = self.memory(moved.start)
            is_wider = at.type == FLOAT64 and residual.type != FLOAT64
            if start is None or (start.type, start.numel) != (at.type, at.numel) or is_wider:
                return None
            given.append((*place, ffi.cast("uintptr_t", start.pointer), moved.growth, moved.pull))
            owners.append(start.owner)
        velocity, momentum = ffi.NULL, 0.0
        if moving is not None:
            at = self._wide(moving.velocity, written=True)
            if at is None or (at.type, at.numel) != (residual.type, residual.numel):
                like = f"{residual.numel} of {TYPES[residual.type]}"
                raise ValueError(f"velocity must be like the residual, {like}, got {at}")
            velocity, momentum = at.pointer, moving.momentum
        parts = ffi.new("hs_part[]", given)
        arrays = residual.pointer, velocity, residual.type, residual.numel, parts, len(parts)
        if not lib.hs_accumulate(*arrays, momentum, rate, self.threads(), notes or ffi.NULL):
            places = [(part.first, part.n) for part in parts]
            raise ValueError(f"gradients must be within the residual's {residual.numel} elements, got {places}")
        return parts

    # --- what is in an array ---

    def measure(self, x: Array, threshold: float = 0.0, *, with_log: bool = False) -> Sums:
        at = self._wide(x)
        if at is None:
            return super().measure(x, threshold, with_log=with_log)
        sums = ffi.new("hs_sums *")
        lib.hs_measure(at.pointer, at.type, at.numel, threshold, with_log, self.threads(), sums)
        return Sums(sums.count, sums.total, sums.squares, sums.largest, sums.logs if with_log else math.nan)

    def norm(self, x: Array) -> float:
        return super().norm(x) if self._wide(x) is None else math.sqrt(self.measure(x).squares)

    # --- selection ---

    def select_above(self, x: Array, threshold: float, capacity: int) -> Selection:
        at = self._wide(x)
        if at is None:
            return super().select_above(x, threshold, capacity)
        capacity = min(capacity, at.numel)
        indices = np.empty(capacity, np.int64)
        written = ffi.from_buffer("int64_t *", indices)
        found = lib.hs_select_above(at.pointer, at.type, at.numel, threshold, capacity, self.threads(), written)
        return Selection(self.array(indices[:found]), found)

    def select_largest(self, x: Array, count: int) -> Selection:
        at = self._wide(x)
        if at is None:
            return super().select_largest(x, count)
        indices = np.empty(_checked(count, at.numel), np.int64)
        written = ffi.from_buffer("int64_t *", indices)
        smallest = lib.hs_select_largest(at.pointer, at.type, at.numel, count, self.threads(), written)
        return Selection(self.array(indices), count, smallest)

    def kth_largest(self, x: Array, count: int) -> float:
        return super().kth_largest(x, count) if self._wide(x) is None else self.select_largest(x, count).smallest

    def sampled_largest(self, x: Array, start: int, stride: int, count: int) -> float:
        sampled = x[start:]
        at = self._wide(sampled)
        if at is None or stride == 1:
            return super().sampled_largest(x, start, stride, count)
        _checked(count, len(sampled[::stride]))
        return cast(float, lib.hs_sampled_largest(at.pointer, at.type, at.numel, stride, count, self.threads()))

    # --- messages ---

    def union(self, gathered: Array, world: int, header: int, numel: int) -> Array | None:
        at = self.memory(gathered)
        if at is None:
            return super().union(gathered, world, header, numel)
        length = _rows(at, 1, world)
        merged = np.empty(world * (length - header), np.int64)
        found = lib.hs_union(at.pointer, length, header, world, numel, ffi.from_buffer("int64_t *", merged))
        return None if found < 0 else self.array(merged[:found])

    def take_out(self, x: Array, indices: Array) -> Array:
        values = np.empty(len(indices), np.float32)
        taken = self._take_out(x, indices, ffi.from_buffer("float *", values), ffi.NULL, 0)
        return self.array(values) if taken else super().take_out(x, indices)

    def take_pairs_out(self, x: Array, indices: Array, capacity: int) -> Array:
        if len(indices) > capacity:
            raise ValueError(f"there must be up to {capacity} indices, got {len(indices)}")
        message = np.empty((capacity, 2), np.int32)
        taken = self._take_out(x, indices, ffi.NULL, ffi.from_buffer("hs_pair *", message), capacity)
        return self.array(message) if taken else super().take_pairs_out(x, indices, capacity)

    def _take_out(self, x: Array, indices: Array, *where: Any) -> bool:
        """Take the entries out and write them where `hs_take` is told. Return False if that is left to the framework."""
        at, some = self._wide(x, written=True), self.memory(indices)
        if at is None:
            return False
        if some is None or some.type != INT64:
            raise ValueError(f"indices must be of int64, got {indices.dtype}")
        if not lib.hs_take(at.pointer, at.type, at.numel, some.pointer, some.numel, *where):
            raise IndexError(f"indices must be in [0, {at.numel})")
        return True

    def pack_values(self, values: Array, length: int, tail: list[float]) -> Array:
        at = self.memory(values)
        if at is None or at.type not in (FLOAT32, FLOAT64):
            return super().pack_values(values, length, tail)
        # It may be as large as the residual.
        lent = pool.lend(length + len(tail), TYPES[at.type])
        lent[at.numel : length], lent[length:] = 0, tail
        message = self.array(lent)
        message[: at.numel] = values
        return message

    def quantize(self, x: Array, message: Array) -> Array:
        at, pairs = self._wide(x, written=True), self.memory(message)
        if at is None or pairs is None or not pairs.writable:
            return super().quantize(x, message)
        capacity = _rows(pairs, 2, 1)
        packed = np.empty(packed_length(at.numel, capacity), np.int32)
        written = ffi.from_buffer("int32_t *", packed), packed.size
        lib.hs_quantize(at.pointer, at.type, at.numel, pairs.pointer, capacity, *written)
        return self.array(packed)

    def unquantize(self, gathered: Array, world: int, numel: int) -> Array:
        at = self.memory(gathered)
        if at is None:
            return super().unquantize(gathered, world, numel)
        length, chunks = _rows(at, 1, world), chunks_of(numel)
        pairs = np.empty((world * packed_room(length, chunks), 2), np.int32)
        written = ffi.from_buffer("hs_pair *", pairs), len(pairs) // world
        lib.hs_unquantize(at.pointer, length, chunks, world, *written)
        return self.array(pairs)

    def rows_in_use(self, messages: Array, world: int, numel: int) -> Array:
        at = self.memory(messages)
        if at is None:
            return super().rows_in_use(messages, world, numel)
        # Pairs have two dimensions, and an index in every second place.
        stride, used = messages.ndim, np.empty(world, np.int64)
        rows = _rows(at, stride, world)
        lib.hs_rows_in_use(at.pointer, stride, rows, world, numel, ffi.from_buffer("int64_t *", used))
        return self.array(used)

    def assemble(self, parts: Sequence[Part], messages: Array, used: list[int], divisor: float) -> None:
        at, world = self.memory(messages), len(used)
        if at is None:
            super().assemble(parts, messages, used, divisor)
            return
        capacity = _rows(at, 2, world)
        if min(used) < 0 or max(used) > capacity:
            raise ValueError(f"used must be within [0, {capacity}], got {used}")
        given = []
        for first, part in parts:
            place = self._wide(part, written=True)
            if place is None:
                raise ValueError(f"a part must be of float32 or float64 in the host's memory, got {part.dtype}")
            given.append((ffi.cast("uintptr_t", place.pointer), place.type, first, place.numel))
        targets = ffi.new("hs_part[]", given)
        if not lib.hs_assemble(targets, len(targets), at.pointer, capacity, world, used, divisor):
            raise IndexError(f"indices must be ascending in each of {world} messages")


def _checked(count: int, numel: int) -> int:
    """Return how many entries are wanted. Raise ValueError if there are not so many."""
    if not 1 <= count <= numel:
        raise ValueError(f"count must be in [1, {numel}], the number of entries, got {count}")
    return count


def _rows(messages: Memory, stride: int, world: int) -> int:
    """Return how many rows, of `stride` numbers each, one of `world` messages has. Raise ValueError if they are no messages."""
    if not world or messages.numel % (stride * world):
        raise ValueError(f"messages must be {world} of the same length, got {messages.numel // stride} rows")
    if messages.type != INT32:
        raise ValueError(f"messages must be of int32, got {TYPES[messages.type]}")
    return messages.numel // (stride * world)
