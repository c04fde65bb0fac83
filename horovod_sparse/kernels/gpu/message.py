"""The kernels that write a message of pairs, check those that have arrived, and add them up. Imports torch and Triton.

Tested by tests/kernels/gpu/test_kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from horovod_sparse.exchange import wire
from horovod_sparse.kernels.gpu.floats import bits_of, value_of
from horovod_sparse.kernels.gpu.search import COLLECTED, LIMIT, MOST_EQUAL, chunk_of, counts_of, must_read_all, steps_of
from horovod_sparse.kernels.gpu.tiles import COLLECTED_AGAIN, FOUND, LIMIT_VALUE, NOT_FINITE, SENT
from horovod_sparse.ops.protocol import Part

CHUNK = 1024
MOST_GROUPS = 1024
_TILE = 4096
"""Entries of a target that one program adds up."""
_LANES = 128
"""Entries of a message that a program adds in one go: with few workers and a small ratio a tile gets no more of each."""
_WIRE_DAMAGED = tl.constexpr(wire.DAMAGED)
_WIRE_NOT_FINITE = tl.constexpr(wire.NOT_FINITE)
_WIRE_PADDING = tl.constexpr(wire.PADDING)
_HEADER = tl.constexpr(wire.HEADER)
_NO_INDEX = tl.constexpr(wire.MAX_BUCKET)
"""Stands for no index: it is beyond every bucket."""
_BITS = tl.constexpr(32)
"""Marks in a word."""


@triton.jit
def store_rows(message, row, index, value, used):
    """Store rows of a message of pairs."""
    tl.store(message + row * 2, index, used)
    tl.store(message + row * 2 + 1, value.to(tl.int32, bitcast=True), used)


@triton.jit(do_not_specialize=["tiles", "groups", "capacity"])
def write(
    residual,
    starts,
    found,
    slots,
    tiles: tl.int64,
    group_above,
    group_equal,
    groups: tl.int64,
    capacity: tl.int64,
    message,
    numbers,
    words,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    TAKES: tl.constexpr,
):
    """Write the message of pairs. If it TAKES, set to zero what is in the message."""
    group = tl.program_id(0)
    limit = tl.load(words + LIMIT)
    most_equal = tl.load(words + MOST_EQUAL)
    all_above, above = counts_of(group_above, group, groups, GROUPS)
    all_equal, equal = counts_of(group_equal, group, groups, GROUPS)
    sent = tl.minimum(all_above + tl.minimum(all_equal, most_equal), capacity)

    first, steps, sparse = steps_of(group, tiles, must_read_all(words), found, BLOCK, SLOTS, TILES, CHUNK)
    for step in range(0, steps):
        indices, valid, x = chunk_of(
            step, sparse, first, residual, tiles, starts, found, slots, words, BLOCK, SLOTS, TILES, CHUNK
        )
        is_above, is_equal = valid & (bits_of(x) > limit), valid & (bits_of(x) == limit)
        # One number holds two counts.
        both = is_above.to(tl.int32) + is_equal.to(tl.int32) * 65536
        before = tl.cumsum(both, 0) - both
        equal_before = equal + (before >> 16)
        row = above + (before & 65535) + tl.minimum(equal_before, most_equal)
        chosen = (is_above | (is_equal & (equal_before < most_equal))) & (row < capacity)
        store_rows(message, row, indices.to(tl.int32), x, chosen)
        if TAKES:
            tl.store(residual + indices, tl.zeros_like(x), chosen)
        these = tl.sum(both, 0)
        above += these & 65535
        equal += these >> 16

    # This program's share of the rows is padded where nothing is sent in them.
    bad = tl.load(numbers + NOT_FINITE).to(tl.int32) > 0
    rows = (capacity + groups - 1) // groups
    for start in range(0, rows, CHUNK):
        number = start + tl.arange(0, CHUNK)
        row = group * rows + number
        unused = (number < rows) & (row >= sent) & (row < capacity)
        index = tl.where(bad & (row == 0), _WIRE_NOT_FINITE, _WIRE_PADDING)
        store_rows(message, row, index, tl.zeros([CHUNK], tl.int32), unused)
    if group == 0:
        tl.store(numbers + SENT, sent.to(tl.float64))
        tl.store(numbers + LIMIT_VALUE, value_of(limit))
        tl.store(numbers + COLLECTED_AGAIN, tl.load(words + COLLECTED).to(tl.float64))


@triton.jit(do_not_specialize=["capacity", "checksum", "most"])
def write_indices(
    pairs,
    capacity: tl.int64,
    checksum: tl.int32,
    proposed,
    most: tl.float64,
    message,
    numbers,
    PROPOSES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write message 3 of the indices of a message of pairs. If it PROPOSES, it does where more than `most` were found."""
    program = tl.program_id(0).to(tl.int64)
    row = program * CHUNK + tl.arange(0, CHUNK)
    index = tl.load(pairs + row * 2, row < capacity, other=_WIRE_PADDING)
    # The sign of a gradient that is not finite is none of the indices.
    tl.store(message + _HEADER + row, tl.maximum(index, _WIRE_PADDING), row < capacity)
    if program == 0:
        bad = tl.load(numbers + NOT_FINITE).to(tl.int32) > 0
        tl.store(message, tl.where(bad, _WIRE_NOT_FINITE, checksum))
        bits = tl.zeros([], tl.int32)
        if PROPOSES:
            bits = tl.where(tl.load(numbers + FOUND) > most, tl.load(proposed).to(tl.int32, bitcast=True), bits)
        tl.store(message + 1, bits)


@triton.jit
def with_tail(row, values, length, checksum, bad):
    """Return message 2 at some rows: values, then zeros up to `length`, then 1 if it is bad, and the bits of the checksum."""
    bit = row - length - 1
    tail = tl.where(bit < 0, bad.to(tl.int32), (checksum >> tl.maximum(bit, 0).to(tl.int32)) & 1)
    return tl.where(row < length, values, tail.to(values.dtype))


@triton.jit(do_not_specialize=["numel", "listed", "capacity", "length", "end", "checksum"])
def take(
    residual,
    numel: tl.int64,
    indices,
    listed: tl.int64,
    capacity: tl.int64,
    pairs,
    values,
    length: tl.int64,
    end: tl.int64,
    checksum: tl.int32,
    numbers,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the message of pairs of the first `listed` of some indices, and set to zero what is in the message.

    If VALUES, write message 2 with these values, too, which has `length` values and ends at `end`.
    """
    row = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    index = tl.load(indices + row, row < listed, other=_WIRE_PADDING).to(tl.int64)
    bad = tl.load(numbers + NOT_FINITE).to(tl.int32) > 0
    chosen = (index >= 0) & (index < numel) & ~bad
    x = tl.load(residual + index, chosen, other=0.0)
    tl.store(residual + index, tl.zeros_like(x), chosen)
    unused = tl.where(bad & (row == 0), _WIRE_NOT_FINITE, _WIRE_PADDING)
    store_rows(pairs, row, tl.where(chosen, index, unused).to(tl.int32), x, row < capacity)
    if VALUES:
        tl.store(values + row, with_tail(row, x, length, checksum, bad), row < end)


@triton.jit(do_not_specialize=["numel", "end", "checksum"])
def write_all(residual, numel: tl.int64, end: tl.int64, checksum: tl.int32, numbers, message, CHUNK: tl.constexpr):
    """Write message 2 with all entries, which ends at `end`."""
    row = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(residual + row, row < numel, other=0.0)
    bad = tl.load(numbers + NOT_FINITE).to(tl.int32) > 0
    tl.store(message + row, with_tail(row, x, numel, checksum, bad), row < end)


@triton.jit(do_not_specialize=["listed", "capacity"])
def pair(indices, values, listed: tl.int64, capacity: tl.int64, message, CHUNK: tl.constexpr):
    """Write the message of pairs of some indices and their values."""
    row = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    index = tl.load(indices + row, row < listed, other=_WIRE_PADDING)
    store_rows(message, row, index.to(tl.int32), tl.load(values + row, row < listed, other=0.0), row < capacity)


def pack(indices: Tensor, values: Tensor, capacity: int) -> Tensor:
    """Do as `Ops.pack`."""
    if len(indices) > capacity:
        raise ValueError(f"there must be up to {capacity} indices, got {len(indices)}")
    message = torch.empty((capacity, 2), dtype=torch.int32, device=values.device)
    asked = indices.contiguous(), values.contiguous(), len(indices), capacity, message
    with torch.cuda.device_of(values):
        pair[(-(-capacity // CHUNK),)](*asked, CHUNK=CHUNK)
    return message


@triton.jit(do_not_specialize=["size", "rows", "numel"])
def check(
    messages,
    size: tl.int64,
    rows: tl.int64,
    numel: tl.int64,
    used,
    marks,
    BEGIN: tl.constexpr,
    STRIDE: tl.constexpr,
    MARKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store what `Ops.rows_in_use` says of each message. One program looks at CHUNK rows of one message.

    Messages have `size` numbers each, and BEGIN of them come before the indices. If MARKS, set the bit of each index in
    `marks`. As unsigned numbers DAMAGED is above NOT_FINITE, and that above every count.
    """
    sender = tl.program_id(0).to(tl.int64)
    message = messages + sender * size + BEGIN
    row = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = row < rows
    index = tl.load(message + row * STRIDE, inside, other=_WIRE_PADDING)
    before = tl.load(message + (row - 1) * STRIDE, inside & (row > 0), other=_WIRE_PADDING)
    follows = (row == 0) | ((before >= 0) & (before < index))
    is_index = (index >= 0) & (index < numel)
    good = (index == _WIRE_PADDING) | (is_index & follows)
    here = tl.max(tl.where(inside & (index >= 0), row + 1, 0), 0).to(tl.int32)
    here = tl.where(tl.min(good.to(tl.int32), 0) > 0, here, _WIRE_DAMAGED)
    here = tl.where(tl.load(message) == _WIRE_NOT_FINITE, _WIRE_NOT_FINITE, here)
    tl.atomic_max(used.to(tl.pointer_type(tl.uint32)) + sender, here.to(tl.uint32, bitcast=True), sem="relaxed")
    if MARKS:
        tl.atomic_or(marks + index // _BITS, 1 << index % _BITS, is_index, sem="relaxed")


def rows_in_use(messages: Tensor, world: int, numel: int) -> Tensor:
    """Do as `Ops.rows_in_use`. The host does not wait for the device."""
    used = torch.zeros(world, dtype=torch.int32, device=messages.device)
    rows, stride = _rows_of(messages, world), messages.dim()
    constants = {"BEGIN": 0, "STRIDE": stride, "MARKS": False, "CHUNK": CHUNK}
    # Triton launches on the current device.
    with torch.cuda.device_of(messages):
        check[(world, -(-rows // CHUNK))](messages, rows * stride, rows, numel, used, used, **constants)
    return used


@triton.jit
def marked(marks, word, end, CHUNK: tl.constexpr):
    """Return which of CHUNK entries, from the first of a word on, are marked in the words before `end`."""
    lane = tl.arange(0, CHUNK)
    at = word + lane // _BITS
    return (tl.load(marks + at, at < end, other=0) >> lane % _BITS) & 1


@triton.jit(do_not_specialize=["words", "each"])
def count_marks(marks, words: tl.int64, each: tl.int64, counts, CHUNK: tl.constexpr):
    """Count the marks in each group of `each` words."""
    group = tl.program_id(0)
    begin = group.to(tl.int64) * each
    end = tl.minimum(begin + each, words)
    found = tl.zeros([CHUNK], tl.int32)
    for word in range(begin, end, CHUNK // _BITS):
        found += marked(marks, word, end, CHUNK)
    tl.store(counts + group, tl.sum(found, 0))


@triton.jit(do_not_specialize=["words", "each", "groups", "size", "world", "room"])
def list_marks(
    marks,
    words: tl.int64,
    each: tl.int64,
    counts,
    groups: tl.int64,
    gathered,
    size: tl.int64,
    world: tl.int64,
    used,
    room: tl.int64,
    indices,
    numbers,
    GROUPS: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """List what is marked, and their number. Copy the headers of the messages, which have `size` numbers."""
    group = tl.program_id(0)
    count, place = counts_of(counts, group, groups, GROUPS)
    begin = group.to(tl.int64) * each
    end = tl.minimum(begin + each, words)
    for word in range(begin, end, CHUNK // _BITS):
        flags = marked(marks, word, end, CHUNK)
        index = tl.arange(0, CHUNK) + word * _BITS
        tl.store(indices + place + tl.cumsum(flags, 0) - flags, index, flags > 0)
        place += tl.sum(flags, 0)
    # This program's share of what is no index.
    rows = (room + groups - 1) // groups
    for start in range(0, rows, CHUNK):
        number = start + tl.arange(0, CHUNK)
        row = group * rows + number
        tl.store(indices + row, tl.full([CHUNK], _NO_INDEX, tl.int64), (number < rows) & (row >= count) & (row < room))
    if group == 0:
        rank = tl.arange(0, RANKS)
        mine = rank < world
        is_damaged = tl.min(tl.load(used + rank, mine, other=0), 0) < 0
        tl.store(numbers, tl.where(is_damaged, _WIRE_DAMAGED, count.to(tl.int32)))
        for at in tl.static_range(_HEADER):
            header = tl.load(gathered + rank * size + at, mine)
            tl.store(numbers + 1 + rank * _HEADER + at, header, mine)


def union(gathered: Tensor, world: int, numel: int) -> tuple[Tensor, Tensor]:
    """Do as `protocols.Sender.union`. The host does not wait for the device. Numbers beyond the bucket stand for no index."""
    size, words = _rows_of(gathered, world), -(-numel // 32)
    rows = size - wire.HEADER
    lengths = world, 1 + world * wire.HEADER, words
    used, numbers, marks = torch.zeros(sum(lengths), dtype=torch.int32, device=gathered.device).split(lengths)
    at_once = CHUNK // 32
    each = -(-words // (MOST_GROUPS * at_once)) * at_once
    groups = -(-words // each)
    counts = torch.empty(groups, dtype=torch.int32, device=gathered.device)
    indices = torch.empty(min(world * rows, numel), dtype=torch.int64, device=gathered.device)
    received, found = (gathered, size, world, used), (marks, words, each, counts)
    lanes = {"GROUPS": triton.next_power_of_2(groups), "RANKS": triton.next_power_of_2(world), "CHUNK": CHUNK}
    kinds = {"BEGIN": wire.HEADER, "STRIDE": 1, "MARKS": True, "CHUNK": CHUNK}
    with torch.cuda.device_of(gathered):
        check[(world, -(-rows // CHUNK))](gathered, size, rows, numel, used, marks, **kinds)
        count_marks[(groups,)](*found, CHUNK=CHUNK)
        list_marks[(groups,)](*found, groups, *received, len(indices), indices, numbers, **lanes)
    return indices, numbers


@triton.jit
def rows_below(messages, rows, limit, world, steps, RANKS: tl.constexpr):
    """Return, for each rank's message, how many of its rows come before those of index `limit` and of padding."""
    rank = tl.arange(0, RANKS)
    low, high = tl.zeros([RANKS], tl.int64), tl.where(rank < world, rows, 0)
    for _ in range(0, steps):
        middle = (low + high) // 2
        is_open = low < high
        index = tl.load(messages + (rank * rows + middle) * 2, is_open, other=0)
        is_below = (index >= 0) & (index < limit)
        low = tl.where(is_open & is_below, middle + 1, low)
        high = tl.where(is_open & ~is_below, middle, high)
    return low


@triton.jit(do_not_specialize=["rows", "world", "steps", "tiles"])
def add_up(
    messages,
    rows: tl.int64,
    world: tl.int64,
    steps: tl.int64,
    divisor: tl.float64,
    table,
    tiles: tl.int64,
    WIDE: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Set one tile of the targets to the sum of all messages' entries there, divided by `divisor`, rank by rank.

    `table` has, for each tile, the index of its first entry in the bucket, how many entries it has, and its address. They are
    of float64 if WIDE, else of float32. Messages that are not in order write nothing beyond the tile.
    """
    tile = tl.program_id(0)
    first, numel = tl.load(table + tile), tl.load(table + tiles + tile)
    address = tl.load(table + 2 * tiles + tile)
    target = address.to(tl.pointer_type(tl.float64)) if WIDE else address.to(tl.pointer_type(tl.float32))
    for start in range(0, numel, CHUNK):
        lanes = start + tl.arange(0, CHUNK)
        tl.store(target + lanes, tl.zeros([CHUNK], target.dtype.element_ty), lanes < numel)
    begins = rows_below(messages, rows, first, world, steps, RANKS)
    ends = rows_below(messages, rows, first + numel, world, steps, RANKS)
    rank = tl.arange(0, RANKS)
    for sender in range(0, world):
        # What other threads of this program have written must be there.
        tl.debug_barrier()
        begin, end = tl.sum(tl.where(rank == sender, begins, 0), 0), tl.sum(tl.where(rank == sender, ends, 0), 0)
        message = messages + sender * rows * 2
        for start in range(begin, end, LANES):
            row = start + tl.arange(0, LANES)
            index = tl.load(message + row * 2, row < end, other=_WIRE_PADDING).to(tl.int64) - first
            value = tl.load(message + row * 2 + 1, row < end, other=0).to(tl.float32, bitcast=True)
            value = tl.div_rn(value, tl.zeros_like(value) + tl.full((), divisor, tl.float64).to(tl.float32))
            used = (row < end) & (index >= 0) & (index < numel)
            before = tl.load(target + index, used, other=0.0)
            tl.store(target + index, before + value.to(before.dtype), used)


def assemble(parts: Sequence[Part], messages: Tensor, world: int, divisor: float) -> None:
    """Do as `Ops.assemble`, with one launch for all parts of a type and all ranks. The host does not wait for the device."""
    rows = _rows_of(messages, world)
    constants = {"RANKS": triton.next_power_of_2(world), "CHUNK": CHUNK, "LANES": _LANES}
    with torch.cuda.device_of(messages):
        for dtype in {target.dtype for _, target in parts}:
            table = _tiles_of([(first, target) for first, target in parts if target.dtype == dtype])
            tiles, where = table.shape[1], sent_to(messages.device, table)
            asked = messages, rows, world, rows.bit_length(), divisor, where, tiles
            add_up[(tiles,)](*asked, WIDE=dtype == torch.float64, **constants)


def _tiles_of(parts: Sequence[Part]) -> NDArray[np.int64]:
    """Return the table of `add_up` for parts of one type."""
    firsts, sizes, addresses = (
        np.array(numbers, np.int64)
        for numbers in zip(*((first, target.numel(), target.data_ptr()) for first, target in parts), strict=True)
    )
    part, number = numbered(-(-sizes // _TILE), np.zeros_like(sizes))
    start = number * _TILE
    lengths = np.minimum(sizes[part] - start, _TILE)
    return np.stack([firsts[part] + start, lengths, addresses[part] + start * parts[0][1].element_size()])


def numbered(counts: ArrayLike, firsts: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for all tiles of some parts, of which each has so many from a first number on, their part and their number."""
    counts, firsts = np.asarray(counts, np.int64), np.asarray(firsts, np.int64)
    part = np.repeat(np.arange(len(counts)), counts)
    return part, np.arange(len(part)) + (firsts - counts.cumsum() + counts)[part]


def sent_to(where: torch.device, table: NDArray[Any]) -> Tensor:
    """Return a table on a device, for which the host does not wait."""
    host = torch.from_numpy(table)
    return host.pin_memory().to(where, non_blocking=True) if where.type == "cuda" else host


def _rows_of(messages: Tensor, world: int) -> int:
    """Return how many rows each message has. Raise ValueError if they are of different lengths."""
    rows, over = divmod(len(messages), world)
    if over:
        # A message that ends early would be read beyond its end.
        raise ValueError(f"messages must have {world} equal parts, got {len(messages)} rows")
    return rows
