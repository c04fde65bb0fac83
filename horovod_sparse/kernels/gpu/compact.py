"""The kernels that make compact messages of pairs (`wire`, message 4), and pairs of those. Imports triton, and constants."""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_sparse.exchange.wire import BAD_COUNTS, HALF_BIAS, HALF_POWERS, NOT_FINITE, PADDING, RUN, RUN_BITS

_PADDING, _NOT_FINITE, _BAD_COUNTS = tl.constexpr(PADDING), tl.constexpr(NOT_FINITE), tl.constexpr(BAD_COUNTS)
_RUN, _RUN_BITS = tl.constexpr(RUN), tl.constexpr(RUN_BITS)
_POWERS, _BIAS = tl.constexpr(HALF_POWERS), tl.constexpr(HALF_BIAS)


@triton.jit
def _upper(value, HALF: tl.constexpr):
    """Return the bits of float32 values rounded to 16 bits, in the upper half of int32."""
    bits = value.to(tl.int32, bitcast=True)
    if HALF == "float16":
        power = ((bits >> 23) & 0xFF) + _BIAS
        small = tl.where(power < _POWERS, value, 0.0)
        nearest = small.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        return tl.where(power < _POWERS, nearest, ((bits >> _RUN_BITS) & 0x8000) | power) << _RUN_BITS
    else:
        rounded = (bits + 0x7FFF + ((bits >> _RUN_BITS) & 1)) & -_RUN
        # Never to infinity: the largest number of the same sign.
        largest = tl.where(bits < 0, -0x810000, 0x7F7F0000)
        return tl.where((rounded & 0x7F800000) == 0x7F800000, largest, rounded)


@triton.jit
def _number(upper, HALF: tl.constexpr):
    """Return the numbers whose bits are in the upper half of int32, as float32."""
    if HALF == "float16":
        half = (upper >> _RUN_BITS).to(tl.int16)
        magnitude = (half & 0x7FFF).to(tl.int32)
        power = ((upper >> 31) << 31) | (tl.minimum(magnitude - _BIAS, 254) << 23)
        nearest = half.to(tl.float16, bitcast=True).to(tl.float32)
        return tl.where(magnitude < _POWERS, nearest, power.to(tl.float32, bitcast=True))
    else:
        return (upper & -_RUN).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["capacity", "runs"])
def write_compact(residual, message, capacity: tl.int64, runs: tl.int64, made, HALF: tl.constexpr, CHUNK: tl.constexpr):
    """Write a compact message to `made`, which is zero. What rounding leaves returns to the residual."""
    row = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = row < capacity
    index = tl.load(message + row * 2, inside, other=_PADDING)
    value = tl.load(message + row * 2 + 1, inside, other=0).to(tl.float32, bitcast=True)
    used = index >= 0
    upper = _upper(value, HALF)
    sent = _number(upper, HALF)
    tl.store(message + row * 2 + 1, sent.to(tl.int32, bitcast=True), used)
    kept = tl.load(residual + index, used, other=0.0)
    tl.store(residual + index, kept + (value - sent).to(kept.dtype), used)
    tl.atomic_add(made + (index >> _RUN_BITS), tl.full([CHUNK], 1, tl.int32), used)
    tl.store(made + runs + row, upper | (index & (_RUN - 1)), used)
    # Then no row is in use.
    tl.store(made + row, _NOT_FINITE, (row == 0) & (index == _NOT_FINITE))


@triton.jit(do_not_specialize=["capacity", "runs"])
def write_pairs(
    gathered,
    ends,
    bad,
    capacity: tl.int64,
    runs: tl.int64,
    pairs,
    ROUNDS: tl.constexpr,
    HALF: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the message of pairs that each of the gathered messages stands for.

    `ends[sender, run]` is the number of the first row after a run. `bad[sender]` is not 0 if the counts are wrong. ROUNDS
    halvings of all runs leave one.
    """
    sender = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = row < capacity
    first = gathered + sender * (runs + capacity)
    is_bad = tl.load(bad + sender) != 0
    used = (row < tl.load(ends + sender * runs + runs - 1)) & inside & (is_bad == 0)
    low = tl.zeros([CHUNK], tl.int64)
    high = low + runs
    for _ in range(ROUNDS):
        middle = (low + high) // 2
        before = tl.load(ends + sender * runs + middle, used & (low < high), other=0) <= row
        low = tl.where(before & (low < high), middle + 1, low)
        high = tl.where(before, high, middle)
    entry = tl.load(first + runs + row, used, other=0)
    index = tl.where(used, low.to(tl.int32) * _RUN + (entry & (_RUN - 1)), _PADDING)
    instead = tl.where(tl.load(first) == _NOT_FINITE, _NOT_FINITE, _BAD_COUNTS)
    index = tl.where(is_bad & (row == 0), instead, index)
    value = tl.where(used, _number(entry, HALF).to(tl.int32, bitcast=True), 0)
    to = pairs + (sender * capacity + row) * 2
    tl.store(to, index, inside)
    tl.store(to + 1, value, inside)
