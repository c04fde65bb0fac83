"""The kernels. Imports triton, and constants.

A bucket is cut into *tiles* of at most BLOCK entries. No tile reaches from one parameter into the next. Tile t holds the
entries from `starts[t]` to `starts[t + 1]`. `absorb` reads and writes the residual once. For each tile it stores sums and the
positions of the tile's *candidates*, which are the entries above a floor. The tile has SLOTS slots for them: each takes the
first index of a run of RUN entries that holds a candidate. The later kernels look at those runs only, with two exceptions.
They look at all entries of a group if one of its tiles had more such runs than slots. They look at all entries of the bucket
if the threshold turned out to be below the floor. They run one program per *group* of TILES tiles. There are few enough
groups for every program to add up the counts of all groups.

Magnitudes are compared as integers: the bits of |x| are in the order of |x|. The k-th largest is found digit by digit, from
the most significant one. A histogram counts the next digit over all entries that begin with the digits found so far, and
that gives the next digit. Each round is a launch. It begins by reading the digit off the histogram that the launch before has
filled. So no program waits for another one, and no program reads what another one of the same launch writes. All atomic
operations add integers. Therefore the same input gives the same bits. What is decided on the device stays there, in `words`
and `numbers`. Launches that turn out not to be needed return at once.
"""

from __future__ import annotations

import sys

import triton
import triton.language as tl

from horovod_sparse.compressors.sidco import FIRST_RATIO
from horovod_sparse.estimation.fits import LEAST_SQUARE
from horovod_sparse.exchange import wire

RUN = 4
"""Number of entries of a run, which a thread loads at once."""
MOST_BINS = 2048
MOST_BLOCK = 2**14
"""The most entries of a tile, so that two counts of a tile fit into an int32."""

NUMBERS = (
    "count",
    "largest",
    "tail_count",
    "tail_total",
    "tail_squares",
    "not_finite",
    "candidates",
    "estimated",
    "found",
    "sent",
    "exact",
    "limit",
    "low",
)
"""The numbers that a step reports, as float64, in this order.

The sums over the bucket come first (as in `Sums`). "candidates" is the number of entries above the floor. "estimated"
is whether a fit gave the threshold, and "found" how many entries qualified. "sent" is how many entries are sent. "exact" is
whether an exact search gave the limit. "limit" is the magnitude that entries were compared with in the end. "low" is a
magnitude that about as many entries exceed as the next cut should leave (0: unknown).
"""

_COUNT = tl.constexpr(0)
_LARGEST = tl.constexpr(1)
_TAIL_COUNT = tl.constexpr(2)
_TAIL_TOTAL = tl.constexpr(3)
_TAIL_SQUARES = tl.constexpr(4)
_NOT_FINITE = tl.constexpr(5)
_CANDIDATES = tl.constexpr(6)
_ESTIMATED = tl.constexpr(7)
_FOUND = tl.constexpr(8)
_SENT = tl.constexpr(9)
_EXACT = tl.constexpr(10)
_LIMIT_VALUE = tl.constexpr(11)
_LOW = tl.constexpr(12)

PARTIALS = 7
"""Number of rows of the tiles' sums. They are the first of the numbers in `NUMBERS`."""
WORDS = 32
# What `fit` writes: the bits of the limit; whether all entries must be read; the rank to search for, or 0; whether any count
# above the limit is accepted.
_FIT_LIMIT = tl.constexpr(0)
_FIT_WHOLE = tl.constexpr(1)
_FIT_RANK = tl.constexpr(2)
_FIT_TRUSTED = tl.constexpr(3)
# The final decisions. `_EQUAL`: how many of the entries that equal the limit are selected.
_WHOLE = tl.constexpr(4)
_LIMIT = tl.constexpr(5)
_EQUAL = tl.constexpr(6)
# What round r starts from: the digits found so far, and the rank among the entries that begin with them (0: no search).
_RANK = tl.constexpr(8)
_PREFIX = tl.constexpr(16)

_RUN = tl.constexpr(RUN)
_MOST_BINS = tl.constexpr(MOST_BINS)
_FIRST_RATIO = tl.constexpr(FIRST_RATIO)
_CONSTANT = tl.constexpr(1e-12)
_LEAST_SQUARE = tl.constexpr(LEAST_SQUARE)
_WIRE_NOT_FINITE = tl.constexpr(wire.NOT_FINITE)
_WIRE_PADDING = tl.constexpr(wire.PADDING)
_LARGEST_FLOAT32 = tl.constexpr(wire.LARGEST)
_LARGEST_FLOAT64 = tl.constexpr(sys.float_info.max)
_NOTHING = tl.constexpr(2**63 - 1)
"""Bits that no magnitude exceeds."""


@triton.jit
def _bits(x):
    """Return the bits of |x|."""
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF


@triton.jit
def _rounded_bits(number, like):
    """Round a float64 number >= 0 to the type of the elements of `like`, and return its bits as int64."""
    return _bits(tl.full((), number, tl.float64).to(like.dtype.element_ty)).to(tl.int64)


@triton.jit
def _value(bits, like):
    """Read the bits in an int64 as a number of the type of the elements of `like`, and return it as float64."""
    if like.dtype.element_ty == tl.float32:
        return bits.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    else:
        return bits.to(tl.float64, bitcast=True)


@triton.jit
def _within_range(x):
    """Replace sums that have overflowed by the largest number of their type."""
    if x.dtype == tl.float32:
        return tl.minimum(tl.maximum(x, -_LARGEST_FLOAT32), _LARGEST_FLOAT32)
    else:
        return tl.minimum(tl.maximum(x, -_LARGEST_FLOAT64), _LARGEST_FLOAT64)


@triton.jit(do_not_specialize=["offset", "first_tile", "tiles"])
def absorb(
    residual,
    gradient,
    velocity,
    offset: tl.int64,
    numel: tl.int64,
    first_tile: tl.int64,
    tiles: tl.int64,
    cut: tl.float64,
    floor: tl.float64,
    partials,
    found,
    slots,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    MEASURES: tl.constexpr,
):
    """Add one parameter's gradient (with MOMENTUM, its velocity) to its residual, and store each tile's sums and candidates.

    `residual`, `gradient` and `velocity` point to the parameter's first entry, which is entry `offset` of the bucket. Entries
    of the gradient that are not finite add nothing. Sums that overflow stay at the largest number. Both are counted.
    """
    tile = first_tile + tl.program_id(0)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    inside = lanes < tl.minimum(numel - start, BLOCK).to(tl.int32)
    x = tl.load(residual + start + lanes, inside, other=0.0)
    not_finite = tl.zeros([BLOCK], tl.int32)
    if HAS_GRADIENT:
        g = tl.load(gradient + start + lanes, inside, other=0.0).to(x.dtype)
        finite = tl.abs(g) < float("inf")
        not_finite = tl.where(finite, 0, 1)
        g = tl.where(finite, g, 0.0)
    if MOMENTUM is None:
        if HAS_GRADIENT:
            x += g
    else:
        v = tl.load(velocity + start + lanes, inside, other=0.0)
        if NESTEROV:
            if HAS_GRADIENT:
                v += g
                x += g
            v *= MOMENTUM
        else:
            v *= MOMENTUM
            if HAS_GRADIENT:
                v += g
        x += v
        tl.store(velocity + start + lanes, _within_range(v), inside)
    not_finite = tl.where(tl.abs(x) < float("inf"), not_finite, 1)
    x = _within_range(x)
    tl.store(residual + start + lanes, x, inside)
    magnitude = tl.abs(x)

    peaks = tl.max(tl.reshape(magnitude, [BLOCK // _RUN, _RUN]), 1)
    bound = tl.full((), floor, tl.float64).to(x.dtype)
    candidate = tl.where(peaks > bound, 1, 0)
    upto = tl.cumsum(candidate, 0)
    index = (offset + start).to(tl.int32) + tl.arange(0, BLOCK // _RUN) * _RUN
    tl.store(slots + tile * SLOTS + (upto - 1), index, (candidate > 0) & (upto <= SLOTS))
    tl.store(found + tile, tl.sum(candidate, 0))

    # One number holds two counts.
    counts = tl.sum(tl.where(magnitude > bound, 1, 0) + not_finite * 65536, 0)
    tl.store(partials + _CANDIDATES * tiles + tile, (counts & 65535).to(tl.float64))
    tl.store(partials + _NOT_FINITE * tiles + tile, (counts >> 16).to(tl.float64))
    if MEASURES:
        bound = tl.full((), cut, tl.float64).to(x.dtype)
        counts = tl.sum(tl.where(magnitude > 0.0, 1, 0) + tl.where(magnitude > bound, 65536, 0), 0)
        tl.store(partials + _COUNT * tiles + tile, (counts & 65535).to(tl.float64))
        tl.store(partials + _TAIL_COUNT * tiles + tile, (counts >> 16).to(tl.float64))
        tl.store(partials + _LARGEST * tiles + tile, tl.max(peaks, 0).to(tl.float64))
        # The excess is zero for entries that are not above the cut. If the cut is infinite, that is all of them.
        bound = tl.minimum(bound, _LARGEST_FLOAT32 if x.dtype == tl.float32 else _LARGEST_FLOAT64)
        excess = tl.maximum(magnitude, bound).to(tl.float64) - bound.to(tl.float64)
        tl.store(partials + _TAIL_TOTAL * tiles + tile, tl.sum(excess, 0))
        tl.store(partials + _TAIL_SQUARES * tiles + tile, tl.sum(excess * excess, 0))


@triton.jit
def exponential(mean, ratio):
    """Compute `fits.exponential`."""
    return mean * -tl.log(ratio)


@triton.jit
def generalized_pareto(mean, variance, ratio):
    """Compute `fits.generalized_pareto`."""
    square = mean * mean
    # As `fits.is_held`. Where it is false, the numbers below avoid a division by zero and are not used.
    held = (square + variance >= _LEAST_SQUARE) & (square + variance < float("inf"))
    divisor = tl.where(held, tl.maximum(variance, square * _CONSTANT), 1.0)
    squared_mean_over_variance = tl.where(held, square, 1.0) / divisor
    shape = (1.0 - squared_mean_over_variance) * 0.5
    scale = mean * (squared_mean_over_variance + 1.0) * 0.5
    log_survival = -tl.log(ratio)
    x = shape * log_survival
    near = tl.abs(x) < 1e-4
    expm1_over = (tl.exp(tl.minimum(x, 700.0)) - 1.0) / tl.where(near, 1.0, x)
    threshold = scale * log_survival * tl.where(near, 1.0 + x / 2.0 + x * x / 6.0, expm1_over)
    return tl.where(held, threshold, exponential(mean, ratio))


@triton.jit(do_not_specialize=["tiles", "k", "aim"])
def fit(
    residual,
    partials,
    tiles: tl.int64,
    k: tl.int64,
    aim: tl.int64,
    cut: tl.float64,
    most_tail: tl.float64,
    floor: tl.float64,
    histograms,
    numbers,
    words,
    ROUNDS: tl.constexpr,
    RULE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add up the tiles' sums in one program, and decide what is to be selected.

    RULE "largest" selects the k largest entries. "above" selects all above `floor`. "exponential" and "gpareto" fit a threshold
    to the entries above `cut` so that `aim` of them exceed it, and select all above the threshold. They do so if the entries
    above `cut` are more than `aim` and at most the fraction `most_tail` of those that are not zero. Otherwise they select the k
    largest.
    """
    lanes = tl.arange(0, CHUNK)
    for start in range(0, ROUNDS * _MOST_BINS, CHUNK):
        tl.store(histograms + start + lanes, tl.zeros([CHUNK], tl.int32))
    zeros = tl.zeros([CHUNK], tl.float64)
    candidates, not_finite = zeros, zeros
    count, largest, tail_count, tail_total, tail_squares = zeros, zeros, zeros, zeros, zeros
    for start in range(0, tiles, CHUNK):
        tile = start + lanes
        inside = tile < tiles
        candidates += tl.load(partials + _CANDIDATES * tiles + tile, inside, other=0.0)
        not_finite += tl.load(partials + _NOT_FINITE * tiles + tile, inside, other=0.0)
        if RULE == "exponential" or RULE == "gpareto":
            count += tl.load(partials + _COUNT * tiles + tile, inside, other=0.0)
            largest = tl.maximum(largest, tl.load(partials + _LARGEST * tiles + tile, inside, other=0.0))
            tail_count += tl.load(partials + _TAIL_COUNT * tiles + tile, inside, other=0.0)
            tail_total += tl.load(partials + _TAIL_TOTAL * tiles + tile, inside, other=0.0)
            tail_squares += tl.load(partials + _TAIL_SQUARES * tiles + tile, inside, other=0.0)
    all_candidates, all_not_finite = tl.sum(candidates, 0), tl.sum(not_finite, 0)
    all_count, all_largest = tl.sum(count, 0), tl.max(largest, 0)
    all_tail, all_total, all_squares = tl.sum(tail_count, 0), tl.sum(tail_total, 0), tl.sum(tail_squares, 0)

    floor_bits = _rounded_bits(floor, residual)
    limit = floor_bits
    rank = tl.full((), 0, tl.int64)
    trusted = tl.full((), 1, tl.int64)
    estimated = tl.full((), 0, tl.int64)
    if RULE == "largest":
        rank += k
    elif RULE != "above":
        wanted = tl.minimum(aim.to(tl.float64), all_count - 1.0)
        few = all_count <= k.to(tl.float64)
        usable = (all_tail > wanted) & (all_tail <= all_count * most_tail)
        number = tl.maximum(all_tail, 1.0)
        mean = all_total / number
        variance = tl.maximum(all_squares / number - mean * mean, 0.0)
        ratio = tl.where(usable & (wanted > 0.0), wanted / number, 1.0)
        step = exponential(mean, ratio) if RULE == "exponential" else generalized_pareto(mean, variance, ratio)
        threshold = tl.where(usable, tl.full((), cut, tl.float64), 0.0) + step
        # As `search.below_largest`: the limit is at most the number just below the largest magnitude.
        below = tl.maximum(_rounded_bits(all_largest, residual) - 1, 0)
        # If few, there is room for everything that is not zero.
        limit = tl.where(few, 0, tl.minimum(_rounded_bits(threshold, residual), below))
        estimated = (usable & ~few).to(tl.int64)
        trusted = few.to(tl.int64)
        rank = tl.where(few | usable, 0, k)
    whole = (limit < floor_bits) | (rank.to(tl.float64) > all_candidates)
    if RULE == "exponential" or RULE == "gpareto":
        # The search then also finds the next cut.
        whole = whole | (rank > 0)
    bad = all_not_finite > 0.0
    tl.store(words + _FIT_LIMIT, tl.where(bad, _NOTHING, limit))
    tl.store(words + _FIT_WHOLE, (whole & ~bad).to(tl.int64))
    tl.store(words + _FIT_RANK, tl.where(bad, 0, rank))
    tl.store(words + _FIT_TRUSTED, tl.where(bad, 1, trusted))
    tl.store(numbers + _COUNT, all_count)
    tl.store(numbers + _LARGEST, all_largest)
    tl.store(numbers + _TAIL_COUNT, all_tail)
    tl.store(numbers + _TAIL_TOTAL, all_total)
    tl.store(numbers + _TAIL_SQUARES, all_squares)
    tl.store(numbers + _NOT_FINITE, all_not_finite)
    tl.store(numbers + _CANDIDATES, all_candidates)
    tl.store(numbers + _ESTIMATED, tl.where(bad, 0, estimated).to(tl.float64))
    tl.store(numbers + _FOUND, rank.to(tl.float64))
    tl.store(numbers + _LOW, 0.0)


@triton.jit
def _steps(
    first,
    tiles,
    whole,
    found,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return how many chunks of a group must be looked at, and whether they are made of the runs with candidates."""
    tile = first + tl.arange(0, TILES)
    most = tl.max(tl.load(found + tile, tile < tiles, other=0), 0)
    sparse = (whole == 0) & (most <= SLOTS)
    every = tl.minimum(tiles - first, TILES).to(tl.int32) * (BLOCK // CHUNK)
    return tl.where(sparse, (TILES * SLOTS * _RUN + CHUNK - 1) // CHUNK, every), sparse


@triton.jit
def _chunk(
    step,
    sparse,
    first,
    tiles,
    starts,
    found,
    slots,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the indices of one chunk of a group's entries, and which lanes hold one. Indices ascend from chunk to chunk."""
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
    return indices, valid


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
    prefix = tl.full((), 0, tl.int64)
    if ROUND == 0:
        rank = tl.load(words + _FIT_RANK)
        whole = tl.load(words + _FIT_WHOLE)
        limit = tl.load(words + _FIT_LIMIT)
        if (rank == 0) & (limit != _NOTHING):
            lanes = tl.arange(0, GROUPS)
            above = tl.sum(tl.load(group_above + lanes, lanes < groups, other=0).to(tl.int64), 0)
            far_off = (above < trust_least) | (above > trust_most)
            if far_off & (tl.load(words + _FIT_TRUSTED) == 0):
                rank = k
                whole = tl.full((), 1, tl.int64)
            elif above > capacity:
                rank = capacity
            if group == 0:
                tl.store(numbers + _FOUND, above.to(tl.float64))
        if group == 0:
            tl.store(words + _WHOLE, whole)
            tl.store(words + _LIMIT, limit)
            tl.store(words + _EQUAL, tl.full((), 0, tl.int64))
            tl.store(numbers + _EXACT, (rank > 0).to(tl.float64))
    else:
        whole = tl.load(words + _WHOLE)
        rank = tl.load(words + _RANK + ROUND - 1)
        if rank > 0:
            if ROUND == 1:
                if (group == 0) & (whole > 0):
                    _store_low(residual, histograms, k, cut_exponent, SHIFT + WIDTH, BEFORE, numbers)
            digit, rank = _digit(histograms + (ROUND - 1) * _MOST_BINS, rank, BEFORE)
            prefix = (tl.load(words + _PREFIX + ROUND - 1) << BEFORE) + digit
    if group == 0:
        tl.store(words + _RANK + ROUND, rank)
        tl.store(words + _PREFIX + ROUND, prefix)
    if rank > 0:
        first = group.to(tl.int64) * TILES
        counts = tl.zeros([BINS], tl.int32)
        steps, sparse = _steps(first, tiles, whole, found, BLOCK, SLOTS, TILES, CHUNK)
        for step in range(0, steps):
            indices, valid = _chunk(step, sparse, first, tiles, starts, found, slots, BLOCK, SLOTS, TILES, CHUNK)
            bits = _bits(tl.load(residual + indices, valid, other=0.0))
            digits = bits >> SHIFT
            same = valid & ((digits >> WIDTH) == prefix)
            counts += tl.histogram((digits & (BINS - 1)).to(tl.int32), BINS, same)
        bins = tl.arange(0, BINS)
        tl.atomic_add(histograms + ROUND * _MOST_BINS + bins, counts, counts > 0, sem="relaxed")


@triton.jit
def _store_low(
    residual,
    histograms,
    k,
    cut_exponent,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    numbers,
):
    """Store the next cut: the lower end of the bin of the first digit in which SIDCo's last stage but one would end."""
    count = tl.maximum(tl.load(numbers + _COUNT), 1.0)
    ratio = tl.log(k.to(tl.float64) / count / _FIRST_RATIO)
    left = tl.exp(ratio * cut_exponent) * count * _FIRST_RATIO
    digit, _ = _digit(histograms, tl.maximum(left, 1.0).to(tl.int64), WIDTH)
    tl.store(numbers + _LOW, _value(digit << SHIFT, residual))


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
    numbers,
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
    limit = tl.load(words + _FIT_LIMIT)
    if LAST < 0:
        needed = tl.load(words + _FIT_RANK) == 0
        whole = tl.load(words + _FIT_WHOLE)
    else:
        rank = tl.load(words + _RANK + LAST)
        needed = (rank > 0) | (limit == _NOTHING)
        whole = tl.load(words + _WHOLE)
        if rank > 0:
            digit, equal = _digit(histograms + LAST * _MOST_BINS, rank, WIDTH)
            limit = (tl.load(words + _PREFIX + LAST) << WIDTH) + digit
            if group == 0:
                tl.store(words + _LIMIT, limit)
                tl.store(words + _EQUAL, equal)
    if needed:
        first = group.to(tl.int64) * TILES
        above = tl.zeros([CHUNK], tl.int32)
        same = tl.zeros([CHUNK], tl.int32)
        steps, sparse = _steps(first, tiles, whole, found, BLOCK, SLOTS, TILES, CHUNK)
        for step in range(0, steps):
            indices, valid = _chunk(step, sparse, first, tiles, starts, found, slots, BLOCK, SLOTS, TILES, CHUNK)
            bits = _bits(tl.load(residual + indices, valid, other=0.0))
            above += (valid & (bits > limit)).to(tl.int32)
            same += (valid & (bits == limit)).to(tl.int32)
        tl.store(group_above + group, tl.sum(above, 0))
        tl.store(group_equal + group, tl.sum(same, 0))


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
):
    """Write the message of pairs, and subtract from the residual what is in the message."""
    group = tl.program_id(0)
    limit = tl.load(words + _LIMIT)
    most_equal = tl.load(words + _EQUAL)
    lanes = tl.arange(0, GROUPS)
    all_above = tl.load(group_above + lanes, lanes < groups, other=0).to(tl.int64)
    all_equal = tl.load(group_equal + lanes, lanes < groups, other=0).to(tl.int64)
    above = tl.sum(tl.where(lanes < group, all_above, 0), 0)
    equal = tl.sum(tl.where(lanes < group, all_equal, 0), 0)
    sent = tl.minimum(tl.sum(all_above, 0) + tl.minimum(tl.sum(all_equal, 0), most_equal), capacity)

    first = group.to(tl.int64) * TILES
    steps, sparse = _steps(first, tiles, tl.load(words + _WHOLE), found, BLOCK, SLOTS, TILES, CHUNK)
    for step in range(0, steps):
        indices, valid = _chunk(step, sparse, first, tiles, starts, found, slots, BLOCK, SLOTS, TILES, CHUNK)
        x = tl.load(residual + indices, valid, other=0.0)
        bits = _bits(x)
        is_above = (valid & (bits > limit)).to(tl.int32)
        is_equal = (valid & (bits == limit)).to(tl.int32)
        equal_before = equal + tl.cumsum(is_equal, 0) - is_equal
        row = above + tl.cumsum(is_above, 0) - is_above + tl.minimum(equal_before, most_equal)
        chosen = ((is_above > 0) | ((is_equal > 0) & (equal_before < most_equal))) & (row < capacity)
        if x.dtype == tl.float32:
            value = x
            kept = tl.zeros_like(x)
        else:
            value = tl.minimum(tl.maximum(x, -_LARGEST_FLOAT32), _LARGEST_FLOAT32).to(tl.float32)
            kept = x - value.to(tl.float64)
        tl.store(message + row * 2, indices.to(tl.int32), chosen)
        tl.store(message + row * 2 + 1, value.to(tl.int32, bitcast=True), chosen)
        tl.store(residual + indices, kept, chosen)
        above += tl.sum(is_above, 0)
        equal += tl.sum(is_equal, 0)

    # Each program pads its own share of the rows.
    rows = (capacity + groups - 1) // groups
    bad = tl.load(numbers + _NOT_FINITE).to(tl.int32) > 0
    for start in range(0, rows, CHUNK):
        number = start + tl.arange(0, CHUNK)
        row = group * rows + number
        unused = (number < rows) & (row >= sent) & (row < capacity)
        index = tl.where(bad & (row == 0), _WIRE_NOT_FINITE, _WIRE_PADDING)
        tl.store(message + row * 2, index, unused)
        tl.store(message + row * 2 + 1, tl.zeros([CHUNK], tl.int32), unused)
    if group == 0:
        tl.store(numbers + _SENT, sent.to(tl.float64))
        tl.store(numbers + _LIMIT_VALUE, _value(limit, residual))


@triton.jit(do_not_specialize=["rows", "numel"])
def scatter(message, rows: tl.int64, divisor: tl.float64, target, numel: tl.int64, CHUNK: tl.constexpr):
    """Add the entries of one rank's message that are within a dense target to it, divided by `divisor`."""
    row = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = row < rows
    index = tl.load(message + row * 2, inside, other=_WIRE_PADDING)
    value = tl.load(message + row * 2 + 1, inside, other=0).to(tl.float32, bitcast=True)
    value = tl.div_rn(value, tl.zeros_like(value) + tl.full((), divisor, tl.float64).to(tl.float32))
    used = (index >= 0) & (index < numel)
    before = tl.load(target + index, used, other=0.0)
    tl.store(target + index, before + value.to(before.dtype), used)
