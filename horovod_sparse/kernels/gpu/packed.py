"""The kernels that make packed messages of pairs, and the other way round (`wire`, message 4). Imports torch and Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from horovod_sparse.exchange import wire
from horovod_sparse.kernels.gpu.message import CHUNK, rows_below, store_rows

_LANES = 256
"""Entries of a chunk that a program looks at in one go."""
_BITS = tl.constexpr(wire.CHUNK_BITS)
_MASK = tl.constexpr(wire.CHUNK - 1)
_RANGE = tl.constexpr(wire.LEVEL_RANGE)
_SIGN = tl.constexpr(wire.SIGN)
_PADDING = tl.constexpr(wire.PADDING)
_NOT_FINITE = tl.constexpr(wire.NOT_FINITE)
_BAD_COUNTS = tl.constexpr(wire.BAD_COUNTS)


@triton.jit
def _with(number, total, least, most, magnitude, chosen):
    """Return number, sum, smallest and largest of some magnitudes, lane by lane, with those that are chosen."""
    number += tl.where(chosen, 1.0, 0.0)
    total += tl.where(chosen, magnitude, 0.0)
    least = tl.minimum(least, tl.where(chosen, magnitude, float("inf")))
    return number, total, least, tl.maximum(most, tl.where(chosen, magnitude, 0.0))


@triton.jit
def _level(number, total, least, most):
    """Return the bits of the level that stands for magnitudes of which each lane has so many, as a bfloat16."""
    level = tl.minimum(tl.sum(total, 0) / tl.maximum(tl.sum(number, 0), 1.0), 2.0 * tl.min(least, 0))
    level = tl.where(tl.max(most, 0) > level * _RANGE, 0.0, level)
    return level.to(tl.float32).to(tl.int32, bitcast=True) >> 16


@triton.jit
def _entries(message, start, end, LANES: tl.constexpr):
    """Return which rows of a message are looked at, and their indices, values and magnitudes."""
    row = start + tl.arange(0, LANES)
    used = row < end
    value = tl.load(message + row * 2 + 1, used, other=0).to(tl.float32, bitcast=True)
    return row, used, value, tl.abs(value).to(tl.float64)


@triton.jit(do_not_specialize=["rows", "steps", "chunks"])
def level(message, rows: tl.int64, steps: tl.int64, residual, header, chunks: tl.int64, codes, LANES: tl.constexpr):
    """Round the values of one chunk of the bucket to two levels. What that leaves goes back to the residual.

    Stores the chunk's numbers in the header, and of every entry its sign and its level.
    """
    chunk = tl.program_id(0).to(tl.int64)
    begin = tl.sum(rows_below(message, rows, chunk << _BITS, 1, steps, 1), 0)
    end = tl.sum(rows_below(message, rows, (chunk + 1) << _BITS, 1, steps, 1), 0)
    count = (end - begin).to(tl.float64)
    totals = tl.zeros([LANES], tl.float64)
    for start in range(begin, end, LANES):
        _, _, _, magnitude = _entries(message, start, end, LANES)
        totals += magnitude
    mean = tl.sum(totals, 0) / tl.maximum(count, 1.0)
    number, total, least, most = totals * 0.0, totals * 0.0, totals * 0.0 + float("inf"), totals * 0.0
    large_number, large_total, large_least, large_most = number, total, least, most
    for start in range(begin, end, LANES):
        _, used, _, magnitude = _entries(message, start, end, LANES)
        chosen = used & (magnitude <= mean)
        number, total, least, most = _with(number, total, least, most, magnitude, chosen)
        chosen = used & (magnitude > mean)
        large_number, large_total, large_least, large_most = _with(
            large_number, large_total, large_least, large_most, magnitude, chosen
        )
    first = _level(number, total, least, most)
    second = _level(large_number, large_total, large_least, large_most)
    for start in range(begin, end, LANES):
        row, used, value, magnitude = _entries(message, start, end, LANES)
        is_large = magnitude > mean
        bits = (tl.where(is_large, second, first) << 16) | (value.to(tl.int32, bitcast=True) & _SIGN)
        index = tl.load(message + row * 2, used, other=0).to(tl.int64)
        left = value - bits.to(tl.float32, bitcast=True)
        before = tl.load(residual + index, used, other=0.0)
        tl.store(residual + index, before + left.to(before.dtype), used)
        tl.store(message + row * 2 + 1, bits, used)
        tl.store(codes + row, (bits < 0).to(tl.int8) + 2 * is_large.to(tl.int8), used)
    says = tl.where((chunk == 0) & (tl.load(message) == _NOT_FINITE), _NOT_FINITE, (end - begin).to(tl.int32))
    tl.store(header + chunk, says.to(tl.int16))
    tl.store(header + chunks + chunk, first.to(tl.int16))
    tl.store(header + 2 * chunks + chunk, second.to(tl.int16))


@triton.jit
def _position(message, row, rows):
    """Return the position of a row's entry within its chunk; 0 for padding."""
    index = tl.load(message + row * 2, row < rows, other=_PADDING)
    return tl.where(index >= 0, index & _MASK, 0)


@triton.jit
def _code(message, codes, row, rows):
    used = tl.load(message + row * 2, row < rows, other=_PADDING) >= 0
    return tl.load(codes + row, used, other=0).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "room"])
def join(message, rows: tl.int64, codes, room: tl.int64, out, CHUNK: tl.constexpr):
    """Write the three rows about CHUNK entries, as bytes: lower bits, upper bits, signs and levels."""
    first = tl.program_id(0).to(tl.int64) * CHUNK
    row = first + tl.arange(0, CHUNK)
    tl.store(out + row, (_position(message, row, rows) & 255).to(tl.uint8), row < room)
    half = first // 2 + tl.arange(0, CHUNK // 2)
    upper = (_position(message, half * 2, rows) >> 8) | ((_position(message, half * 2 + 1, rows) >> 8) << 4)
    tl.store(out + room + half, upper.to(tl.uint8), half < room // 2)
    quarter = first // 4 + tl.arange(0, CHUNK // 4)
    four = tl.zeros([CHUNK // 4], tl.int32)
    for number in tl.static_range(4):
        four |= _code(message, codes, quarter * 4 + number, rows) << (2 * number)
    tl.store(out + room + room // 2 + quarter, four.to(tl.uint8), quarter < room // 4)


def quantize(x: Tensor, message: Tensor) -> Tensor:
    """Do as `Ops.quantize`. The host does not wait for the device."""
    chunks, rows = wire.chunks_of(len(x)), len(message)
    length, packed = wire.header_length(chunks), message.new_zeros(wire.packed_length(len(x), rows))
    header, entries = packed.view(torch.int16), packed[length:].view(torch.uint8)
    codes, room = torch.empty(rows, dtype=torch.int8, device=x.device), wire.packed_room(len(packed), chunks)
    with torch.cuda.device_of(x):
        level[(chunks,)](message, rows, rows.bit_length(), x, header, chunks, codes, LANES=_LANES)
        join[(-(-room // CHUNK),)](message, rows, codes, room, entries, CHUNK=CHUNK)
    return packed


@triton.jit(do_not_specialize=["length", "entries", "chunks", "steps", "room"])
def part(
    packed,
    length: tl.int64,
    entries: tl.int64,
    chunks: tl.int64,
    steps: tl.int64,
    ends,
    least,
    room: tl.int64,
    messages,
    CHUNK: tl.constexpr,
):
    """Write CHUNK rows of the message of pairs that a rank's packed message stands for. It has `length` bytes.

    Those about the entries begin at `entries`. `ends` are the sums of the counts up to each chunk, `least` the lowest count.
    """
    sender = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = row < room
    data = packed + sender * length
    rows, header = data + entries, data.to(tl.pointer_type(tl.int16))
    ends += sender * chunks
    bad = (tl.load(least + sender).to(tl.int32) < 0) | (tl.load(ends + chunks - 1) > room)
    used = inside & (row < tl.load(ends + chunks - 1)) & ~bad
    low, high = tl.zeros([CHUNK], tl.int64), tl.zeros([CHUNK], tl.int64) + chunks
    for _ in range(0, steps):
        middle = (low + high) // 2
        is_open = used & (low < high)
        is_before = tl.load(ends + middle, is_open, other=0) <= row
        low = tl.where(is_open & is_before, middle + 1, low)
        high = tl.where(is_open & ~is_before, middle, high)
    lower = tl.load(rows + row, used, other=0).to(tl.int32)
    upper = tl.load(rows + room + row // 2, used, other=0).to(tl.int32) >> ((row % 2) * 4).to(tl.int32) & 15
    code = tl.load(rows + room + room // 2 + row // 4, used, other=0).to(tl.int32) >> ((row % 4) * 2).to(tl.int32) & 3
    magnitude = tl.load(header + chunks + low + chunks * (code >> 1), used, other=0).to(tl.int32)
    index = (low << _BITS).to(tl.int32) + (upper << 8) + lower
    says = tl.where(tl.load(header).to(tl.int32) == _NOT_FINITE, _NOT_FINITE, _BAD_COUNTS)
    unused = tl.where(bad & (row == 0), says, _PADDING)
    bits = tl.where(used, (magnitude << 16) | (code << 31), 0)
    store_rows(messages + sender * room * 2, row, tl.where(used, index, unused), bits, inside)


def unquantize(gathered: Tensor, world: int, numel: int) -> Tensor:
    """Do as `Ops.unquantize`. The host does not wait for the device."""
    packed, chunks = gathered.view(world, -1), wire.chunks_of(numel)
    length, room = packed.shape[1], wire.packed_room(packed.shape[1], chunks)
    counts = packed.view(torch.int16)[:, :chunks]
    ends, least = counts.cumsum(1, dtype=torch.int64), counts.amin(1)
    messages = torch.empty((world * room, 2), dtype=torch.int32, device=gathered.device)
    data, entries = packed.view(torch.uint8), 4 * wire.header_length(chunks)
    with torch.cuda.device_of(gathered):
        where = data, 4 * length, entries, chunks, chunks.bit_length(), ends, least
        part[(world, -(-room // CHUNK))](*where, room, messages, CHUNK=CHUNK)
    return messages
