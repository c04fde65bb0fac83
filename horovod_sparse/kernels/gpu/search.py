"""The kernels that search for the k-th largest entry, and count what is selected. Imports triton, and constants.

They read the candidates alone, run by run. If these are too few, `sample` estimates from some of the entries what the
candidates should exceed, and `collect` lists them again. If they are still too few, all entries are read: what is selected is
exact in any case.

Tested by tests/kernels/gpu/test_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_sparse.compressors.sidco import FIRST_RATIO
from horovod_sparse.kernels.gpu.floats import bits_of, value_of
from horovod_sparse.kernels.gpu.threshold import (
    BEGIN,
    END,
    FIT_LIMIT,
    FIT_RANK,
    FIT_SHORT,
    FIT_TRUSTED,
    HISTOGRAM,
    NOTHING,
)
from horovod_sparse.kernels.gpu.tiles import COUNT, EXACT, FOUND, LOW, RUN, list_runs, run_peaks

WORDS = 32
# The final decisions, after those of `fit`: the bits of the limit, and how many of the entries that equal it are selected. Then
# what candidates are collected again by (0: they are not), and how many there are then.
LIMIT, MOST_EQUAL, _COLLECTS_BY, COLLECTED = map(tl.constexpr, range(4, 8))
_BY_LIMIT, _BY_SAMPLE = map(tl.constexpr, range(1, 3))
# What round r starts from: the rank among the entries that begin with the digits found so far (0: no search), and the digits.
_RANK, _PREFIX, _WANTS_LOW = map(tl.constexpr, range(8, 32, 8))

_RUN = tl.constexpr(RUN)
_FIRST_RATIO = tl.constexpr(FIRST_RATIO)


@triton.jit
def must_read_all(words):
    """Return whether the k-th largest entry may not be among the candidates, although they were collected by a sample."""
    return (tl.load(words + _COLLECTS_BY) == _BY_SAMPLE) & (tl.load(words + COLLECTED) < tl.load(words + _RANK))


@triton.jit
def steps_of(
    group, tiles, whole, found, BLOCK: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr
):
    """Return a group's first tile, how many of its chunks to look at, and whether they are made of the runs with candidates."""
    first = group.to(tl.int64) * TILES
    tile = first + tl.arange(0, TILES)
    most = tl.max(tl.load(found + tile, tile < tiles, other=0), 0)
    sparse = ~whole & (most <= SLOTS)
    every = tl.minimum(tiles - first, TILES).to(tl.int32) * (BLOCK // CHUNK)
    return first, tl.where(sparse, (TILES * SLOTS * _RUN + CHUNK - 1) // CHUNK, every), sparse


@triton.jit
def chunk_of(
    step,
    sparse,
    first,
    residual,
    tiles,
    starts,
    found,
    slots,
    words,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the indices of one chunk of a group's entries, which lanes hold one, and the entries.

    Indices ascend from chunk to chunk.
    """
    lanes = tl.arange(0, CHUNK)
    if sparse:
        run = (step * CHUNK + lanes) // _RUN
        tile, slot = first + run // SLOTS, run % SLOTS
        used = (run < TILES * SLOTS) & (tile < tiles)
        used = used & (slot < tl.load(found + tile, used, other=0))
        indices = tl.load(slots + tile * SLOTS + slot, used, other=0).to(tl.int64) + lanes % _RUN
        # The last run of a parameter may be shorter.
        valid = used & (indices < tl.load(starts + tile + 1, used, other=0))
    else:
        here = first + step // (BLOCK // CHUNK)
        indices = tl.load(starts + here) + step % (BLOCK // CHUNK) * CHUNK + lanes
        valid = indices < tl.load(starts + here + 1)
    valid = valid & (indices >= tl.load(words + BEGIN)) & (indices < tl.load(words + END))
    return indices, valid, tl.load(residual + indices, valid, other=0.0)


@triton.jit
def counts_of(group_counts, group, groups, GROUPS: tl.constexpr):
    """Return how many entries all groups have counted, and how many of those belong to the groups before this one."""
    lanes = tl.arange(0, GROUPS)
    counts = tl.load(group_counts + lanes, lanes < groups, other=0).to(tl.int64)
    return tl.sum(counts, 0), tl.sum(tl.where(lanes < group, counts, 0), 0)


@triton.jit
def _digit(histogram, rank, WIDTH: tl.constexpr):
    """Return the bin that holds the entry of a rank, counted from the largest, and the entry's rank within that bin."""
    bins = tl.arange(0, 1 << WIDTH)
    counts = tl.load(histogram + bins)
    upto = tl.cumsum(counts, 0)
    above = (tl.sum(counts, 0) - upto).to(tl.int64)
    here = (above < rank) & (rank <= above + counts)
    digit = tl.sum(tl.where(here, bins, 0), 0).to(tl.int64)
    return digit, rank - tl.sum(tl.where(here, above, 0), 0)


@triton.jit
def _read_round(histograms, words, ROUND: tl.constexpr, WIDTH: tl.constexpr):
    """Read off the digit that a round has counted. Return the rank after it, and the digits found so far (0, 0: no search)."""
    rank = tl.load(words + _RANK + ROUND)
    digits = tl.full((), 0, tl.int64)
    if rank > 0:
        digit, rank = _digit(histograms + ROUND * HISTOGRAM, rank, WIDTH)
        digits = (tl.load(words + _PREFIX + ROUND) << WIDTH) + digit
    return rank, digits


@triton.jit
def _begin_search(
    group_above, groups, k, capacity, trust_least, trust_most, numbers, words, CUTS: tl.constexpr, GROUPS: tl.constexpr
):
    """Decide whether a search is needed. Return what candidates are collected by, and whether the next cut is wanted."""
    group = tl.program_id(0)
    rank = tl.load(words + FIT_RANK)
    short = tl.load(words + FIT_SHORT) > 0
    limit = tl.load(words + FIT_LIMIT)
    by = tl.where(rank > 0, _BY_SAMPLE, _BY_LIMIT)
    far_off = tl.full((), False, tl.int1)
    if (rank == 0) & (limit != NOTHING):
        above, _ = counts_of(group_above, group, groups, GROUPS)
        far_off = ((above < trust_least) | (above > trust_most)) & (tl.load(words + FIT_TRUSTED) == 0)
        if far_off:
            rank = k
        elif above > capacity:
            rank = capacity
        if above < rank:
            by = tl.full((), _BY_SAMPLE, tl.int32)
            short = tl.full((), True, tl.int1)
        if group == 0:
            tl.store(numbers + FOUND, above.to(tl.float64))
    by = tl.where(short, by, 0)
    wants_low = CUTS & ((tl.load(words + FIT_RANK) > 0) | far_off)
    if group == 0:
        tl.store(words + LIMIT, limit)
        tl.store(words + MOST_EQUAL, tl.full((), 0, tl.int64))
        tl.store(words + _RANK, rank)
        tl.store(words + _PREFIX, tl.full((), 0, tl.int64))
        tl.store(words + _COLLECTS_BY, by.to(tl.int64))
        tl.store(words + COLLECTED, tl.full((), 0, tl.int64))
        tl.store(words + _WANTS_LOW, wants_low.to(tl.int64))
        tl.store(numbers + EXACT, (rank > 0).to(tl.float64))
    return by, wants_low


@triton.jit
def _store_low(counts, k, cut_exponent, stride, numbers, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Store the next cut: the lower end of the bin of the first digit in which SIDCo's last stage but one would end."""
    count = tl.maximum(tl.load(numbers + COUNT), 1.0)
    ratio = tl.log(k.to(tl.float64) / count / _FIRST_RATIO)
    left = tl.exp(ratio * cut_exponent) * count * _FIRST_RATIO / stride
    digit, _ = _digit(counts, tl.maximum(left, 1.0).to(tl.int64), WIDTH)
    tl.store(numbers + LOW, value_of(digit << SHIFT))


@triton.jit(do_not_specialize=["tiles", "groups", "k", "capacity", "trust_least", "trust_most"])
def sample(
    residual,
    starts,
    found,
    slots,
    tiles: tl.int64,
    group_above,
    groups: tl.int64,
    k: tl.int64,
    capacity: tl.int64,
    trust_least: tl.int64,
    trust_most: tl.int64,
    counts,
    numbers,
    words,
    CUTS: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Decide whether an exact search is needed, and count some of the entries by their first digit if that helps.

    It is needed either because `fit` asks for it or by the number of entries above the limit of `fit`, which is the sum of
    `group_above`. One run in STRIDE of each tile is looked at.
    """
    BINS: tl.constexpr = 1 << WIDTH
    EACH: tl.constexpr = BLOCK // STRIDE
    group = tl.program_id(0)
    by, wants_low = _begin_search(
        group_above, groups, k, capacity, trust_least, trust_most, numbers, words, CUTS, GROUPS
    )
    if (by == _BY_SAMPLE) | wants_low:
        bins = tl.zeros([BINS], tl.int32)
        for first in range(0, TILES * EACH, CHUNK):
            lane = first + tl.arange(0, CHUNK)
            tile = group.to(tl.int64) * TILES + lane // EACH
            used = (lane < TILES * EACH) & (tile < tiles)
            # Another place in every tile, because the entries of a layer may have a period.
            run = lane % EACH // _RUN * STRIDE + (tile * 40503 >> 4) % STRIDE
            indices = tl.load(starts + tile, used, other=0) + run * _RUN + lane % _RUN
            used = used & (indices < tl.load(starts + tile + 1, used, other=0))
            used = used & (indices >= tl.load(words + BEGIN)) & (indices < tl.load(words + END))
            x = tl.load(residual + indices, used, other=0.0)
            bins += tl.histogram((bits_of(x) >> SHIFT).to(tl.int32), BINS, used)
        tl.atomic_add(counts + tl.arange(0, BINS), bins, bins > 0, sem="relaxed")


@triton.jit(do_not_specialize=["tiles", "k"])
def collect(
    residual,
    starts,
    found,
    slots,
    tiles: tl.int64,
    k: tl.int64,
    cut_exponent: tl.float64,
    counts,
    numbers,
    words,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store the next cut, and list the candidates of all tiles again, each if `sample` says so."""
    group = tl.program_id(0)
    by = tl.load(words + _COLLECTS_BY)
    if (group == 0) & (tl.load(words + _WANTS_LOW) > 0):
        _store_low(counts, k, cut_exponent, STRIDE, numbers, SHIFT, WIDTH)
    if by > 0:
        floor = tl.load(words + LIMIT)
        if by == _BY_SAMPLE:
            expected = tl.load(words + _RANK).to(tl.float64) / STRIDE
            # Half as many more, and four times the deviation of such a count.
            safe = expected * 1.5 + 4.0 * tl.sqrt(expected) + 8.0
            digit, _ = _digit(counts, safe.to(tl.int64), WIDTH)
            floor = (digit << SHIFT) - 1
        first = group.to(tl.int64) * TILES
        begin, end = tl.load(words + BEGIN), tl.load(words + END)
        above = tl.zeros([CHUNK], tl.int32)
        for tile in range(first, tl.minimum(first + TILES, tiles)):
            start = tl.load(starts + tile)
            left = (tl.load(starts + tile + 1) - start).to(tl.int32)
            listed = tl.full((), 0, tl.int32)
            for at in range(0, left, CHUNK):
                lanes = at + tl.arange(0, CHUNK)
                valid = (lanes < left) & (start + lanes >= begin) & (start + lanes < end)
                x = tl.load(residual + start + lanes, valid, other=0.0)
                wanted = (valid & (bits_of(x) > floor)).to(tl.int32)
                index = start.to(tl.int32) + at + tl.arange(0, CHUNK // _RUN) * _RUN
                listed = list_runs(listed, run_peaks(wanted, CHUNK), index, slots + tile * SLOTS, SLOTS)
                above += wanted
            tl.store(found + tile, listed)
        tl.atomic_add(words + COLLECTED, tl.sum(above, 0).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["tiles"])
def histogram(
    residual,
    starts,
    found,
    slots,
    tiles: tl.int64,
    histograms,
    words,
    ROUND: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    BEFORE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count, by the digit at SHIFT, the entries that begin with the digits found so far, if there is a search.

    Rounds after the first one begin by reading the previous digit off its histogram. The digit is WIDTH bits wide, and the
    previous digit BEFORE bits.
    """
    BINS: tl.constexpr = 1 << WIDTH
    group = tl.program_id(0)
    if ROUND == 0:
        rank, prefix = tl.load(words + _RANK), tl.full((), 0, tl.int64)
    else:
        rank, prefix = _read_round(histograms, words, ROUND - 1, BEFORE)
        if group == 0:
            tl.store(words + _RANK + ROUND, rank)
            tl.store(words + _PREFIX + ROUND, prefix)
    if rank > 0:
        counts = tl.zeros([BINS], tl.int32)
        whole = must_read_all(words)
        first, steps, sparse = steps_of(group, tiles, whole, found, BLOCK, SLOTS, TILES, CHUNK)
        for step in range(0, steps):
            _, valid, x = chunk_of(
                step, sparse, first, residual, tiles, starts, found, slots, words, BLOCK, SLOTS, TILES, CHUNK
            )
            digits = bits_of(x) >> SHIFT
            same = valid & ((digits >> WIDTH) == prefix)
            counts += tl.histogram((digits & (BINS - 1)).to(tl.int32), BINS, same)
        bins = tl.arange(0, BINS)
        tl.atomic_add(histograms + ROUND * HISTOGRAM + bins, counts, counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["tiles"])
def count(
    residual,
    starts,
    found,
    slots,
    tiles: tl.int64,
    group_above,
    group_equal,
    histograms,
    words,
    LAST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count the entries of each group that are above the limit, and those equal to it.

    If LAST is -1, the limit is the one that `fit` gave, if it gave one. Otherwise it is that of the exact search, if there was
    one. Then LAST is the last round of the search, and WIDTH the number of bits of the last digit.
    """
    group = tl.program_id(0)
    limit = tl.load(words + FIT_LIMIT)
    if LAST < 0:
        needed = tl.load(words + FIT_RANK) == 0
        whole = tl.load(words + FIT_SHORT) > 0
    else:
        most_equal, digits = _read_round(histograms, words, LAST, WIDTH)
        needed = (most_equal > 0) | (limit == NOTHING)
        whole = must_read_all(words)
        if most_equal > 0:
            limit = digits
            if group == 0:
                tl.store(words + LIMIT, limit)
                tl.store(words + MOST_EQUAL, most_equal)
    if needed:
        above = tl.zeros([CHUNK], tl.int32)
        equal = tl.zeros([CHUNK], tl.int32)
        first, steps, sparse = steps_of(group, tiles, whole, found, BLOCK, SLOTS, TILES, CHUNK)
        for step in range(0, steps):
            _, valid, x = chunk_of(
                step, sparse, first, residual, tiles, starts, found, slots, words, BLOCK, SLOTS, TILES, CHUNK
            )
            above += (valid & (bits_of(x) > limit)).to(tl.int32)
            equal += (valid & (bits_of(x) == limit)).to(tl.int32)
        tl.store(group_above + group, tl.sum(above, 0))
        tl.store(group_equal + group, tl.sum(equal, 0))
