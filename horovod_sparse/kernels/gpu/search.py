"""The kernels that search for the k-th largest entry, and count what is selected. Imports triton, and constants."""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_sparse.compressors.sidco import FIRST_RATIO
from horovod_sparse.kernels.gpu.floats import bits_of, value_of
from horovod_sparse.kernels.gpu.threshold import FIT_LIMIT, FIT_RANK, FIT_TRUSTED, FIT_WHOLE, HISTOGRAM, NOTHING
from horovod_sparse.kernels.gpu.tiles import COUNT, EXACT, FOUND, LOW, RUN

WORDS = 32
# The final decisions, after those of `fit`: whether all entries must be read; the bits of the limit; how many of the entries
# that equal the limit are selected.
WHOLE, LIMIT, MOST_EQUAL = map(tl.constexpr, range(4, 7))
# What round r starts from: the digits found so far, and the rank among the entries that begin with them (0: no search).
_RANK = tl.constexpr(8)
_PREFIX = tl.constexpr(16)

_RUN = tl.constexpr(RUN)
_FIRST_RATIO = tl.constexpr(FIRST_RATIO)


@triton.jit
def steps_of(
    group, tiles, whole, found, BLOCK: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr
):
    """Return a group's first tile, how many of its chunks to look at, and whether they are made of the runs with candidates."""
    first = group.to(tl.int64) * TILES
    tile = first + tl.arange(0, TILES)
    most = tl.max(tl.load(found + tile, tile < tiles, other=0), 0)
    sparse = (whole == 0) & (most <= SLOTS)
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
    group_above, group, groups, k, capacity, trust_least, trust_most, numbers, words, GROUPS: tl.constexpr
):
    """Decide whether a search is needed. Return the rank to search for (0: none), and whether all entries must be read."""
    rank = tl.load(words + FIT_RANK)
    whole = tl.load(words + FIT_WHOLE)
    limit = tl.load(words + FIT_LIMIT)
    if (rank == 0) & (limit != NOTHING):
        above, _ = counts_of(group_above, group, groups, GROUPS)
        far_off = (above < trust_least) | (above > trust_most)
        if far_off & (tl.load(words + FIT_TRUSTED) == 0):
            rank = k
            whole = tl.full((), 1, tl.int64)
        elif above > capacity:
            rank = capacity
        if group == 0:
            tl.store(numbers + FOUND, above.to(tl.float64))
    if group == 0:
        tl.store(words + WHOLE, whole)
        tl.store(words + LIMIT, limit)
        tl.store(words + MOST_EQUAL, tl.full((), 0, tl.int64))
        tl.store(numbers + EXACT, (rank > 0).to(tl.float64))
    return rank, whole


@triton.jit
def _store_low(residual, histograms, k, cut_exponent, numbers, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Store the next cut: the lower end of the bin of the first digit in which SIDCo's last stage but one would end."""
    count = tl.maximum(tl.load(numbers + COUNT), 1.0)
    ratio = tl.log(k.to(tl.float64) / count / _FIRST_RATIO)
    left = tl.exp(ratio * cut_exponent) * count * _FIRST_RATIO
    digit, _ = _digit(histograms, tl.maximum(left, 1.0).to(tl.int64), WIDTH)
    tl.store(numbers + LOW, value_of(digit << SHIFT, residual))


@triton.jit(do_not_specialize=["tiles", "groups", "k", "capacity", "trust_least", "trust_most"])
def histogram(
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
    cut_exponent: tl.float64,
    histograms,
    numbers,
    words,
    ROUND: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    BEFORE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Count, by the digit at SHIFT, the entries that begin with the digits found so far, if an exact search is needed.

    Round 0 decides whether it is needed, either because `fit` asks for it or by the number of entries above the limit of `fit`,
    which is the sum of `group_above`. Later rounds first read the previous digit off its histogram. The digit is WIDTH bits
    wide, and the previous digit BEFORE bits.
    """
    BINS: tl.constexpr = 1 << WIDTH
    group = tl.program_id(0)
    if ROUND == 0:
        rank, whole = _begin_search(
            group_above, group, groups, k, capacity, trust_least, trust_most, numbers, words, GROUPS
        )
        prefix = tl.full((), 0, tl.int64)
    else:
        whole = tl.load(words + WHOLE)
        rank, prefix = _read_round(histograms, words, ROUND - 1, BEFORE)
        if ROUND == 1 and (group == 0) & (whole > 0) & (rank > 0):
            _store_low(residual, histograms, k, cut_exponent, numbers, SHIFT + WIDTH, BEFORE)
    if group == 0:
        tl.store(words + _RANK + ROUND, rank)
        tl.store(words + _PREFIX + ROUND, prefix)
    if rank > 0:
        counts = tl.zeros([BINS], tl.int32)
        first, steps, sparse = steps_of(group, tiles, whole, found, BLOCK, SLOTS, TILES, CHUNK)
        for step in range(0, steps):
            _, valid, x = chunk_of(
                step, sparse, first, residual, tiles, starts, found, slots, BLOCK, SLOTS, TILES, CHUNK
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
        whole = tl.load(words + FIT_WHOLE)
    else:
        most_equal, digits = _read_round(histograms, words, LAST, WIDTH)
        needed = (most_equal > 0) | (limit == NOTHING)
        whole = tl.load(words + WHOLE)
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
                step, sparse, first, residual, tiles, starts, found, slots, BLOCK, SLOTS, TILES, CHUNK
            )
            above += (valid & (bits_of(x) > limit)).to(tl.int32)
            equal += (valid & (bits_of(x) == limit)).to(tl.int32)
        tl.store(group_above + group, tl.sum(above, 0))
        tl.store(group_equal + group, tl.sum(equal, 0))
