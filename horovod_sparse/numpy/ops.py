"""The array operations in NumPy: the oracle. Written for clarity. Imports no framework except NumPy.

Tested by tests/ops/test_protocol.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.exchange import wire
from horovod_sparse.ops.cached import Cached
from horovod_sparse.ops.protocol import Moved, Moving, Ops, Part, Selection, Sums, Tracked

Array = NDArray[Any]


class NumpyOps(Ops):
    """Implements `horovod_sparse.ops.protocol.Ops` on `numpy.ndarray`."""

    def zeros(self, count: int, dtype: str, like: Array) -> Array:
        return np.zeros(count, dtype=dtype)

    def tracked(self, x: Array) -> Tracked:
        return cast(Tracked, Cached(self, x))

    def accumulate(
        self, buffer: Array, gradients: Sequence[Part], moving: Moving | None = None, rate: float = 1.0
    ) -> list[int]:
        return [self._accumulate(buffer, first, gradient, moving, rate) for first, gradient in gradients]

    def _accumulate(
        self, buffer: Array, first: int, gradient: Array | Moved, moving: Moving | None, rate: float
    ) -> int:
        if isinstance(gradient, Moved):
            gradient = _distance(gradient, buffer.dtype)
        part = slice(first, first + gradient.size)
        residual = buffer[part]
        if first < 0 or residual.size != gradient.size:
            raise ValueError(f"gradients must be within the residual's {buffer.size} elements, got {part}")
        added, not_finite = _finite(gradient, residual.dtype)
        velocity = None if moving is None else moving.velocity[part]
        with np.errstate(over="ignore"):
            moved = added if moving is None or velocity is None else velocity * moving.momentum + added
            total = residual + moved * rate
        keep_finite(moved)
        overflowed = keep_finite(total)
        # In one statement, so that an interrupt finds both as they were or both as they will be.
        (added if velocity is None else velocity)[:], residual[:] = moved, total
        return not_finite + overflowed

    def measure(self, x: Array, threshold: float = 0.0, *, with_log: bool = False) -> Sums:
        magnitudes, limit = np.abs(x), _limit(x, threshold)
        excesses = magnitudes[magnitudes > limit].astype(np.float64) - np.float64(limit)
        largest, logs = float(magnitudes.max(initial=0.0)), float(np.log(excesses).sum()) if with_log else math.nan
        with np.errstate(over="ignore"):
            return Sums(excesses.size, float(excesses.sum()), float(excesses @ excesses), largest, logs)

    def assign(self, residual: Array, gradient: Array) -> None:
        # A loaded state may hold another framework's arrays, of which NumPy 2.2 cannot make a copy without a warning.
        residual[...] = np.asarray(gradient).reshape(residual.shape)

    def copy_parts(self, x: Array, parts: Sequence[Part], divisor: float) -> None:
        for first, target in parts:
            np.divide(x[first : first + len(target)], divisor, out=target, casting="same_kind")

    def copy(self, array: Array) -> Array:
        return array.copy()

    def all_finite(self, array: Array) -> bool:
        return bool(np.isfinite(array).all())

    def told(self, arrays: Sequence[Array]) -> list[list[Any]]:
        return [array.tolist() for array in arrays]

    def norm(self, x: Array) -> float:
        with np.errstate(over="ignore"):
            return float(np.linalg.norm(x.astype(np.float64)))

    def select_above(self, x: Array, threshold: float, capacity: int) -> Selection:
        indices = np.flatnonzero(np.abs(x) > _limit(x, threshold))
        found = indices.size
        if found > capacity:
            indices = indices[self.select_largest(x[indices], capacity).indices]
        return Selection(indices, found)

    def select_largest(self, x: Array, count: int) -> Selection:
        magnitudes = np.abs(x)
        smallest = self.kth_largest(x, count)
        above = magnitudes > smallest
        equal = np.flatnonzero(magnitudes == smallest)
        above[equal[: count - np.count_nonzero(above)]] = True
        return Selection(np.flatnonzero(above), count, smallest)

    def kth_largest(self, x: Array, count: int) -> float:
        return float(np.partition(np.abs(x), x.size - count)[x.size - count])

    def indices(self, host: Array, like: Array) -> Array:
        return host

    def as_numpy(self, array: Array) -> Array:
        view = array.view()
        view.flags.writeable = False
        return view

    def union(self, gathered: Array, world: int, header: int, numel: int) -> Array | None:
        messages = [message[header:] for message in wire.split(gathered, world)]
        if any(_rows_in_use(message, numel) < 0 for message in messages):
            return None
        merged = np.unique(np.concatenate(messages)).astype(np.int64)
        return merged[merged >= 0]

    def take_out(self, x: Array, indices: Array) -> Array:
        largest = np.finfo(np.float32).max
        taken = x[indices]
        values = taken.astype(np.float32) if x.dtype == np.float32 else taken.clip(-largest, largest).astype(np.float32)
        x[indices] = 0.0 if x.dtype == np.float32 else taken - values
        return values

    def pack(self, indices: Array, values: Array, capacity: int) -> Array:
        message = np.zeros((capacity, 2), dtype=np.int32)
        message[:, 0] = wire.PADDING
        message[: indices.size, 0] = indices
        message[: indices.size, 1] = values.view(np.int32)
        return message

    def quantize(self, x: Array, message: Array) -> Array:
        chunks = wire.chunks_of(x.size)
        header = np.zeros((2 * wire.header_length(chunks),), np.int16)
        used = int(np.count_nonzero(message[:, 0] >= 0))
        indices, taken = self.unpack(message, used)
        chunk, magnitudes = indices >> wire.CHUNK_BITS, np.abs(taken).astype(np.float64)
        counts = np.bincount(chunk, minlength=chunks)
        means = np.bincount(chunk, magnitudes, chunks) / counts.clip(min=1)
        # One for each chunk and level.
        group = chunk + chunks * (magnitudes > means[chunk])
        levels = np.bincount(group, magnitudes, 2 * chunks) / np.bincount(group, minlength=2 * chunks).clip(min=1)
        smallest, largest = np.full(2 * chunks, np.inf), np.zeros(2 * chunks)
        np.minimum.at(smallest, group, magnitudes)
        np.maximum.at(largest, group, magnitudes)
        levels = np.minimum(levels, 2 * smallest)
        levels[largest > wire.LEVEL_RANGE * levels] = 0
        header[:chunks] = counts
        header[chunks : 3 * chunks] = levels.astype(np.float32).view(np.int32) >> 16
        if message[0, 0] == wire.NOT_FINITE:
            header[0] = wire.NOT_FINITE
        bits = header[chunks:][group].astype(np.int32) << 16 | message[:used, 1] & wire.SIGN
        x[indices] += taken - bits.view(np.float32)
        message[:used, 1] = bits
        entries = np.zeros((2, -(-len(message) // wire.BLOCK) * wire.BLOCK), np.int32)
        entries[:, :used] = indices % wire.CHUNK, (bits < 0) + 2 * (group >= chunks)
        rows = entries[0] & 0xFF, _joined(entries[0] >> 8, 4), _joined(entries[1], 2)
        return np.concatenate([header.view(np.uint8), *(row.astype(np.uint8) for row in rows)]).view(np.int32)

    def unquantize(self, gathered: Array, world: int, numel: int) -> Array:
        return np.concatenate([_unquantize(message, wire.chunks_of(numel)) for message in wire.split(gathered, world)])

    def rows_in_use(self, messages: Array, world: int, numel: int) -> Array:
        indices = messages if messages.ndim == 1 else messages[:, 0]
        return np.array([_rows_in_use(message, numel) for message in np.split(indices, world)])

    def unpack(self, message: Array, used: int) -> tuple[Array, Array]:
        return message[:used, 0].astype(np.int64), np.ascontiguousarray(message[:used, 1]).view(np.float32)

    def pack_values(self, values: Array, length: int, tail: list[float]) -> Array:
        message = np.empty(length + len(tail), values.dtype)
        message[: values.size], message[values.size : length], message[length:] = values, 0.0, tail
        return message

    def pack_indices(self, indices: Array, header: list[int], capacity: int) -> Array:
        padding = np.full(capacity - indices.size, wire.PADDING)
        return np.concatenate((header, indices, padding)).astype(np.int32)

    def assemble(self, parts: Sequence[Part], messages: Array, used: list[int], divisor: float) -> None:
        split = zip(wire.split(messages, len(used)), used, strict=True)
        entries = [self.unpack(message, rows) for message, rows in split]
        for indices, _ in entries:
            if (indices[1:] <= indices[:-1]).any():
                raise IndexError(f"indices must be ascending in each of {len(used)} messages")
        for first, part in parts:
            part[:] = 0
            for indices, values in entries:
                inside = slice(*np.searchsorted(indices, (first, first + part.size)))
                part[indices[inside] - first] += values[inside] / np.float32(divisor)


def _unquantize(message: Array, chunks: int) -> Array:
    """Return the message of pairs that one packed message stands for."""
    length = wire.header_length(chunks)
    counts, levels = np.split(message[:length].view(np.int16)[: 3 * chunks].astype(np.int32), [chunks])
    room = wire.packed_room(message.size, chunks)
    lower, upper, values = np.split(message[length:].view(np.uint8), [room, room + room // 2])
    pairs = np.zeros((room, 2), np.int32)
    pairs[:, 0] = wire.PADDING
    used = int(counts.sum())
    if counts[0] == wire.NOT_FINITE:
        pairs[0, 0] = wire.NOT_FINITE
    elif (counts < 0).any() or used > room:
        pairs[0, 0] = wire.BAD_COUNTS
    else:
        chunk = np.repeat(np.arange(chunks, dtype=np.int32), counts)
        code = _parted(values, 2)[:used]
        pairs[:used, 0] = chunk * wire.CHUNK + (_parted(upper, 4)[:used] << 8) + lower[:used]
        pairs[:used, 1] = levels[chunk + chunks * (code >> 1)] << 16 | code << 31
    return pairs


def _joined(numbers: Array, bits: int) -> Array:
    """Return numbers of so many bits, several in a byte, the first one lowest."""
    shifts = np.arange(0, 8, bits)
    joined: Array = (numbers.reshape(-1, shifts.size) << shifts).sum(axis=1)
    return joined


def _parted(joined: Array, bits: int) -> Array:
    """Return the numbers of so many bits that are joined in bytes."""
    return (joined[:, None].astype(np.int32) >> np.arange(0, 8, bits) & (1 << bits) - 1).reshape(-1)


def _rows_in_use(indices: Array, numel: int) -> int:
    if indices[0] == wire.NOT_FINITE:
        return wire.NOT_FINITE
    used = int(np.count_nonzero(indices >= 0))
    ascends = (np.diff(indices[:used], prepend=-1, append=numel) > 0).all()
    return used if ascends and (indices[used:] == wire.PADDING).all() else wire.DAMAGED


def keep_finite(sums: Array) -> int:
    """Bring overflowed sums back to the largest number of their type, in place. Return how many there were."""
    overflowed = int(np.count_nonzero(np.isinf(sums)))
    if overflowed:
        largest = np.finfo(sums.dtype).max
        np.clip(sums, -largest, largest, out=sums)
    return overflowed


def _distance(moved: Moved, dtype: Any) -> Array:
    wide = np.promote_types(moved.now.dtype, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        now, start = moved.now.astype(wide), moved.start.astype(wide)
        distance: Array = (now - start) * wide.type(moved.growth) + start * wide.type(moved.pull)
        return distance


def _finite(gradient: Array, dtype: Any) -> tuple[Array, int]:
    """Return the gradient, flat and of type `dtype`, with zeros for entries that are not finite then, and their number."""
    with np.errstate(over="ignore"):
        converted = gradient.astype(dtype).reshape(-1)
    finite = np.isfinite(converted)
    return np.where(finite, converted, 0), int(finite.size - np.count_nonzero(finite))


def _limit(x: Array, threshold: float) -> Any:
    """Return the threshold in the precision of the comparison; infinity if it is beyond the range."""
    with np.errstate(over="ignore"):
        return x.dtype.type(threshold)
