"""The kernel that takes in gradients tile by tile, and the numbers that a step leaves. Imports triton, and constants.

Tested by tests/kernels/gpu/test_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_sparse.kernels.gpu.floats import clip

RUN = 4
"""Number of entries of a run, which a thread loads at once."""
MOST_BLOCK = 2**14
"""The most entries of a tile, so that two counts of a tile fit into an int32."""

SUMS = ("count", "largest", "tail_count", "tail_total", "tail_squares", "not_finite", "candidates")
"""The sums over a tile and over the bucket (as in `Sums`). "candidates" is the number of entries above the floor."""
COUNT, LARGEST, TAIL_COUNT, TAIL_TOTAL, TAIL_SQUARES, NOT_FINITE, CANDIDATES = map(tl.constexpr, range(len(SUMS)))

NUMBERS = (*SUMS, "estimated", "found", "sent", "exact", "limit", "low", "collected")
"""The numbers that a step reports, as float64, in this order.

The sums over the bucket come first. "estimated" is whether a fit gave the threshold, and "found" how many entries qualified.
"sent" is how many entries are sent. "exact" is whether an exact search gave the limit. "limit" is the magnitude that entries
were compared with in the end. "low" is a magnitude that about as many entries exceed as the next cut should leave (0: unknown).
"collected" is how many candidates there were when they were collected again (0: they were not).
"""
ESTIMATED, FOUND, SENT, EXACT, LIMIT_VALUE, LOW, COLLECTED_AGAIN = map(tl.constexpr, range(len(SUMS), len(NUMBERS)))

_RUN = tl.constexpr(RUN)


@triton.jit
def _add_to_velocity(g, velocity, inside, momentum):
    """Add the gradient to the velocity, and store that. Return what is added to the residual."""
    v = tl.load(velocity, inside, other=0.0)
    v *= tl.full((), momentum, tl.float64).to(v.dtype)
    v += g
    tl.store(velocity, clip(v), inside)
    return v


@triton.jit
def list_runs(listed, wanted, index, slots, SLOTS: tl.constexpr):
    """Add the first indices of the wanted runs to a tile's list, behind `listed` others. Return how many there are now.

    There may be more than slots. Then the list is of no use, but the number is right.
    """
    upto = listed + tl.cumsum(wanted, 0)
    tl.store(slots + (upto - 1), index, (wanted > 0) & (upto <= SLOTS))
    return listed + tl.sum(wanted, 0)


@triton.jit
def run_peaks(x, CHUNK: tl.constexpr):
    """Return the largest of each run's entries."""
    return tl.max(tl.reshape(x, [CHUNK // _RUN, _RUN]), 1)


@triton.jit
def _store_sum(partials, ROW: tl.constexpr, tiles, tile, number):
    tl.store(partials + ROW * tiles + tile, number.to(tl.float64))


@triton.jit
def _store_two(partials, LOW: tl.constexpr, HIGH: tl.constexpr, tiles, tile, counts):
    """Store the sums of two counts, of which the second is multiplied by 65536."""
    both = tl.sum(counts, 0)
    _store_sum(partials, LOW, tiles, tile, both & 65535)
    _store_sum(partials, HIGH, tiles, tile, both >> 16)


@triton.jit(do_not_specialize=["count", "tiles", "begin", "end"])
def accumulate(
    residual,
    velocity,
    starts,
    table,
    count: tl.int64,
    tiles: tl.int64,
    begin: tl.int64,
    end: tl.int64,
    cut: tl.float64,
    floor: tl.float64,
    momentum: tl.float64,
    rate: tl.float64,
    partials,
    found,
    slots,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_VELOCITY: tl.constexpr,
    MOVED: tl.constexpr,
    MEASURES: tl.constexpr,
):
    """Add `rate` times a tile's gradient, or its velocity, to its residual, and store the tile's sums and candidates.

    `table` has the numbers of `count` tiles, then the addresses of their gradients, of type GRADIENT; 0 stands for no
    gradient. If MOVED, gradients are `ops.protocol.Moved`: the addresses of their starts follow, then the bits of their
    growths and pulls as float64. If ALIGNED, a thread may load RUN entries of all tiles and gradients at once. Entries of the
    gradient that are not finite add nothing. Sums that overflow stay at the largest number. Both are counted. Candidates are
    among the entries from `begin` to `end`.
    """
    tile = tl.load(table + tl.program_id(0))
    address = tl.load(table + count + tl.program_id(0))
    start = tl.load(starts + tile)
    left = (tl.load(starts + tile + 1) - start).to(tl.int32)
    gradient = address.to(tl.pointer_type(GRADIENT))
    if ALIGNED:
        start = tl.multiple_of(start, _RUN)
        left = tl.multiple_of(left, _RUN)
        gradient = tl.multiple_of(gradient, 16)
    if MOVED:
        begun = tl.load(table + 2 * count + tl.program_id(0)).to(tl.pointer_type(GRADIENT))
        if ALIGNED:
            begun = tl.multiple_of(begun, 16)
        growth = tl.load(table + 3 * count + tl.program_id(0)).to(tl.float64, bitcast=True)
        pull = tl.load(table + 4 * count + tl.program_id(0)).to(tl.float64, bitcast=True)
    dtype = residual.dtype.element_ty
    bound = tl.full((), floor, tl.float64).to(dtype)
    listed = tl.full((), 0, tl.int32)
    # Each lane sums up what it sees. The lanes are added at the end.
    candidates_bad, count_tail = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    largest = tl.zeros([CHUNK], dtype)
    tail_total, tail_squares = tl.zeros([CHUNK], tl.float64), tl.zeros([CHUNK], tl.float64)
    cut_bound = tl.full((), cut, tl.float64).to(dtype)
    # An excess over it is zero for entries that are not above the cut. If the cut is infinite, that is all of them.
    finite_cut = clip(cut_bound)
    for first in range(0, left, CHUNK):
        lanes = first + tl.arange(0, CHUNK)
        inside = lanes < left
        x = tl.load(residual + start + lanes, inside, other=0.0)
        g = tl.load(gradient + lanes, inside & (address != 0), other=0.0)
        if MOVED:
            s = tl.load(begun + lanes, inside & (address != 0), other=0.0)
            # Before the distance is taken, nothing is rounded.
            if tl.float64 != GRADIENT:
                g, s = g.to(dtype), s.to(dtype)
            g = (g - s) * growth.to(g.dtype) + s * pull.to(g.dtype)
        g = g.to(dtype)
        finite = tl.abs(g) < float("inf")
        g, not_finite = tl.where(finite, g, 0.0), tl.where(finite, 0, 1)
        if HAS_VELOCITY:
            g = _add_to_velocity(g, velocity + start + lanes, inside, momentum)
        x += g * tl.full((), rate, tl.float64).to(dtype)
        not_finite = tl.where(tl.abs(x) < float("inf"), not_finite, 1)
        x = clip(x)
        tl.store(residual + start + lanes, x, inside)

        magnitude = tl.where((start + lanes >= begin) & (start + lanes < end), tl.abs(x), 0.0)
        wanted = tl.where(run_peaks(magnitude, CHUNK) > bound, 1, 0)
        index = start.to(tl.int32) + first + tl.arange(0, CHUNK // _RUN) * _RUN
        listed = list_runs(listed, wanted, index, slots + tile * SLOTS, SLOTS)
        candidates_bad += tl.where(magnitude > bound, 1, 0) + not_finite * 65536
        if MEASURES:
            count_tail += tl.where(magnitude > 0.0, 1, 0) + tl.where(magnitude > cut_bound, 65536, 0)
            largest = tl.maximum(largest, magnitude)
            excess = tl.maximum(magnitude, finite_cut).to(tl.float64) - finite_cut.to(tl.float64)
            tail_total += excess
            tail_squares += excess * excess
    tl.store(found + tile, listed)
    _store_two(partials, CANDIDATES, NOT_FINITE, tiles, tile, candidates_bad)
    if MEASURES:
        _store_two(partials, COUNT, TAIL_COUNT, tiles, tile, count_tail)
        _store_sum(partials, LARGEST, tiles, tile, tl.max(largest, 0))
        _store_sum(partials, TAIL_TOTAL, tiles, tile, tl.sum(tail_total, 0))
        _store_sum(partials, TAIL_SQUARES, tiles, tile, tl.sum(tail_squares, 0))


@triton.jit
def _load_sums(partials, ROW: tl.constexpr, tiles, tile):
    return tl.load(partials + ROW * tiles + tile, tile < tiles, other=0.0)


@triton.jit
def add_up(partials, tiles, gives_up, numbers, MEASURED: tl.constexpr, CHUNK: tl.constexpr):
    """Add up the sums of all tiles, store the result in `numbers`, and return it in the order of `SUMS`.

    If `gives_up` is 1 and not 0, it counts as an entry that is not finite.
    """
    zeros = tl.zeros([CHUNK], tl.float64)
    count, largest, tail_count, tail_total, tail_squares = zeros, zeros, zeros, zeros, zeros
    not_finite, candidates = zeros, zeros
    for start in range(0, tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        candidates += _load_sums(partials, CANDIDATES, tiles, tile)
        not_finite += _load_sums(partials, NOT_FINITE, tiles, tile)
        if MEASURED:
            count += _load_sums(partials, COUNT, tiles, tile)
            largest = tl.maximum(largest, _load_sums(partials, LARGEST, tiles, tile))
            tail_count += _load_sums(partials, TAIL_COUNT, tiles, tile)
            tail_total += _load_sums(partials, TAIL_TOTAL, tiles, tile)
            tail_squares += _load_sums(partials, TAIL_SQUARES, tiles, tile)
    all_count, all_largest, all_tail = tl.sum(count, 0), tl.max(largest, 0), tl.sum(tail_count, 0)
    all_total, all_squares = tl.sum(tail_total, 0), tl.sum(tail_squares, 0)
    all_not_finite, all_candidates = tl.sum(not_finite, 0) + gives_up, tl.sum(candidates, 0)
    tl.store(numbers + COUNT, all_count)
    tl.store(numbers + LARGEST, all_largest)
    tl.store(numbers + TAIL_COUNT, all_tail)
    tl.store(numbers + TAIL_TOTAL, all_total)
    tl.store(numbers + TAIL_SQUARES, all_squares)
    tl.store(numbers + NOT_FINITE, all_not_finite)
    tl.store(numbers + CANDIDATES, all_candidates)
    return all_count, all_largest, all_tail, all_total, all_squares, all_not_finite, all_candidates
