"""The array operations with compiled kernels, for arrays of any framework in the host's memory. Imports no framework."""

# mypy: disable-error-code="safe-super"
# The methods of `super()` are those of the framework's operations, from which the adapter's class derives too.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.exchange.wire import chunks_of, packed_length, packed_room
from horovod_sparse.kernels import ffi, lib, memory, pool
from horovod_sparse.kernels.memory import FLOAT32, FLOAT64, INT32, INT64, TYPES, HostOps, Memory
from horovod_sparse.kernels.tracked import TrackedMemory
from horovod_sparse.ops.protocol import Array, Moving, Part, Selection, Sums, Tracked

_SPARE = 16
"""Room for this many times as many indices as are expected. Memory that is not written to costs nothing."""
_MOST_CANDIDATES = 5
"""The most candidates for the k largest, as a multiple of k: so few are cheaper to sort than the whole array."""
_LEAST_CANDIDATES = 1.75
"""If a quarter of the array is less than this multiple of k, a sample often finds too many, and is in vain."""
_LEAST_SAMPLED = 100
"""How many of the k largest entries a sample holds on average, at least: their number is then known to a tenth."""


class KernelOps(HostOps):
    """Implements `ops.protocol.Ops` by kernels. Selects the same entries as the framework's operations.

    An adapter's class derives from this one and from the framework's operations. Those do what kernels cannot: arrays on other
    devices, arrays of other types, and the operations that are not here.
    """

    def _wide(self, x: Array) -> Memory | None:
        """Return the memory of a residual; None if it is left to the framework's operations."""
        at = self.memory(x)
        return at if at is not None and at.type <= FLOAT64 else None

    # --- gradients in ---

    def tracked(self, x: Array) -> Tracked:
        at = self._wide(x)
        return super().tracked(x) if at is None or not at.writable else cast(Tracked, TrackedMemory(self, x, at))

    def accumulate(
        self, buffer: Array, gradients: Sequence[Part], moving: Moving | None = None, rate: float = 1.0
    ) -> list[int]:
        at = self._wide(buffer)
        taken = at and memory.take_in(self, at.write(), gradients, moving, rate)
        if taken is None:
            return super().accumulate(buffer, gradients, moving, rate)
        return [part.not_finite for part in taken]

    # --- what is in an array ---

    def measure(self, x: Array, threshold: float = 0.0, *, with_log: bool = False) -> Sums:
        at = self._wide(x)
        if at is None:
            return super().measure(x, threshold, with_log=with_log)
        sums = ffi.new("hs_sums *")
        lib.hs_measure(*at.read(), threshold, with_log, self.threads(), sums)
        return memory.sums_of(sums, with_log)

    def norm(self, x: Array) -> float:
        return super().norm(x) if self._wide(x) is None else math.sqrt(self.measure(x).squares)

    # --- selection ---

    def select_above(self, x: Array, threshold: float, capacity: int) -> Selection:
        return self.select_named(x, None, threshold, capacity)

    def select_named(self, x: Array, names: NDArray[np.int32] | None, threshold: float, capacity: int) -> Selection:
        at = self._wide(x)
        if at is None or threshold < 0.0:
            assert names is None
            return super().select_above(x, threshold, capacity)
        # Memory that is not written to costs nothing, but a second pass does.
        room, threads, complete = min(_SPARE * capacity, at.numel), self.threads(), ffi.new("int *")
        while not complete[0]:
            above = np.empty(room, np.int32)
            found = lib.hs_select_above(*at.read(), threshold, _written(above), room, threads, complete)
            room, threads = found, 1
        above = above[:found]
        if found > capacity:
            above = above[np.asarray(self.select_largest(x[above], capacity).indices)]
        # NumPy takes three times as long for `names[above]`.
        named = above if names is None else names.take(above)
        return Selection(self.array(named.astype(np.int64)), found)

    def select_largest(self, x: Array, count: int) -> Selection:
        if self._wide(x) is None:
            return super().select_largest(x, count)
        few = self._candidates(x, count)
        among = x if few is None else x[few]
        smallest, host = self.kth_largest(among, count), np.asarray(among)
        below = np.nextafter(host.dtype.type(smallest), host.dtype.type(0.0))
        indices, found, _ = self.select_above(among, float(below), len(among))
        if found < count:
            # Too few are not zero.
            indices = super().select_largest(among, count).indices
        elif found > count:
            # The last ones of equal magnitude are left out.
            every = np.asarray(indices)
            equal = np.flatnonzero(np.abs(host[every]) == smallest)
            indices = self.array(np.delete(every, equal[count - found :]))
        return Selection(indices if few is None else few[indices], count, smallest)

    def _candidates(self, x: Array, k: int) -> Array | None:
        """Return indices of a few entries that include the k largest, found by a sample; None if it finds no such few."""
        most, stride = min(_MOST_CANDIDATES * k, len(x) // 4), k // _LEAST_SAMPLED
        if most < _LEAST_CANDIDATES * k or stride <= 1:
            return None
        sample = x[:: stride | 1]
        for wanted in (1.5, 3.0):
            threshold = self.kth_largest(sample, min(len(sample), math.ceil(wanted * k * len(sample) / len(x))))
            if threshold > 0.0:
                selection = self.select_above(x, threshold, most)
                if k <= selection.found <= most:
                    return selection.indices
        return None

    def select_in_chunks(self, x: Array, length: int, count: int) -> Selection:
        at = self._wide(x)
        if at is None:
            return super().select_in_chunks(x, length, count)
        if not 1 <= count <= at.numel <= length * count:
            raise ValueError(f"count must be in [1, {at.numel}] with an entry for each chunk of {length}, got {count}")
        indices = np.empty(count, np.int64)
        found = lib.hs_select_in_chunks(*at.read(), length, count, self.threads(), _written(indices))
        return Selection(self.array(indices[:found]), found)

    # --- messages ---

    def union(self, gathered: Array, world: int, header: int, numel: int) -> Array | None:
        at = self.memory(gathered)
        if at is None:
            return super().union(gathered, world, header, numel)
        pointer, length = _messages(at, 1, world)
        merged = np.empty(world * (length - header), np.int64)
        found = lib.hs_union(pointer, length, header, world, numel, _written(merged))
        return None if found < 0 else self.array(merged[:found])

    def take(self, x: Array, indices: Array, entries: Array | None = None) -> Array:
        at = self._wide(x)
        if at is None:
            return super().take(x, indices, entries)
        some = _of_type(INT64, "indices", self.memory(indices))
        values = np.empty(some.numel, np.float32)
        self._take(at, some, entries, _written(values), ffi.NULL, 0)
        return self.array(values)

    def take_pairs(self, x: Array, indices: Array, capacity: int, entries: Array | None = None) -> Array:
        at = self._wide(x)
        if at is None:
            return super().take_pairs(x, indices, capacity, entries)
        some = _of_type(INT64, "indices", self.memory(indices))
        if some.numel > capacity:
            raise ValueError(f"there must be up to {capacity} indices, got {some.numel}")
        message = np.empty((capacity, 2), np.int32)
        self._take(at, some, entries, ffi.NULL, _written(message), capacity)
        return self.array(message)

    def _take(self, at: Memory, some: Memory, entries: Array | None, *where: Any) -> None:
        before = ffi.NULL
        if entries is not None:
            before, _, number = _of_type(at.type, "entries", self.memory(entries)).write()
            if number != some.numel:
                raise ValueError(f"entries must be {some.numel}, got {number}")
        if not lib.hs_take(*at.write(), some.pointer(), some.numel, before, *where):
            raise IndexError(f"indices must be in [0, {at.numel})")

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
        at, pairs = self._wide(x), self.memory(message)
        if at is None or pairs is None:
            return super().quantize(x, message)
        _, capacity = _messages(pairs, 2, 1)
        packed = np.empty(packed_length(at.numel, capacity), np.int32)
        lib.hs_quantize(*at.write(), pairs.write()[0], capacity, _written(packed), packed.size)
        return self.array(packed)

    def unquantize(self, gathered: Array, world: int, numel: int) -> Array:
        at = self.memory(gathered)
        if at is None:
            return super().unquantize(gathered, world, numel)
        (pointer, length), chunks = _messages(at, 1, world), chunks_of(numel)
        pairs = np.empty((world * packed_room(length, chunks), 2), np.int32)
        lib.hs_unquantize(pointer, length, chunks, world, _written(pairs), len(pairs) // world)
        return self.array(pairs)

    def rows_in_use(self, messages: Array, world: int, numel: int) -> list[int | None]:
        at = self.memory(messages)
        if at is None:
            return super().rows_in_use(messages, world, numel)
        # Pairs have two dimensions, and an index in every second place.
        stride, used = messages.ndim, ffi.new("int64_t[]", world)
        pointer, capacity = _messages(at, stride, world)
        lib.hs_rows_in_use(pointer, stride, capacity, world, numel, used)
        return [None if rows == -1 else rows for rows in used]

    def assembler(self, messages: Array, used: list[int], divisor: float) -> Callable[[Sequence[Part]], None]:
        at, world = self.memory(messages), len(used)
        if at is None:
            return super().assembler(messages, used, divisor)
        _, capacity = _messages(at, 2, world)
        if not all(0 <= rows <= capacity for rows in used):
            raise ValueError(f"used must be within [0, {capacity}], got {used}")

        def assemble(targets: Sequence[Part]) -> None:
            of_these = []
            for first, part in targets:
                place = self._wide(part)
                if place is None:
                    raise ValueError(f"a part must be of float32 or float64 in the host's memory, got {part.dtype}")
                _, number, numel = place.write()
                of_these.append((place.address, number, first, numel))
            parts = ffi.new("hs_part[]", of_these)
            # The address is asked for here, so that the messages live as long as this function.
            if not lib.hs_assemble(parts, len(parts), at.pointer(), capacity, world, used, divisor):
                raise IndexError(f"indices must be ascending in each of {len(used)} messages")

        return assemble


def _of_type(number: int, name: str, at: Memory | None) -> Memory:
    if at is None or at.type != number:
        raise ValueError(f"{name} must be of {TYPES[number]}, got {at and TYPES[at.type]}")
    return at


def _messages(at: Memory, stride: int, world: int) -> tuple[Any, int]:
    """Return the address of `world` messages, and how many rows each has, which hold `stride` numbers each."""
    if not world or at.numel % (stride * world):
        raise ValueError(f"messages must be {world} of the same length, got {at.numel // stride} rows")
    return _of_type(INT32, "messages", at).pointer(), at.numel // (stride * world)


def _written(array: NDArray[Any]) -> Any:
    """Return the address of an array that a kernel writes to; it keeps the array alive."""
    return ffi.from_buffer("void *", array)
