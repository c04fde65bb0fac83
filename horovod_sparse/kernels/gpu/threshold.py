"""The kernel that decides what is to be selected, and what it leaves to the later ones. Imports triton, and constants.

Tested by tests/kernels/gpu/test_kernels.py.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from horovod_sparse.estimation.fits import LEAST_SQUARE
from horovod_sparse.kernels.gpu.floats import rounded_bits
from horovod_sparse.kernels.gpu.tiles import ESTIMATED, FOUND, LOW, add_up

MOST_BINS = 2048
"""The most bins of a histogram. Each of them takes so many entries of `histograms`."""
HISTOGRAM = tl.constexpr(MOST_BINS)
# What `fit` writes: the bits of the limit; whether the candidates are too few; the rank to search for, or 0; whether any count
# above the limit is accepted.
FIT_LIMIT, FIT_SHORT, FIT_RANK, FIT_TRUSTED = map(tl.constexpr, range(4))
BEGIN, END = map(tl.constexpr, (30, 31))
"""Where `fit` writes the range of the entries that are looked at, behind all other words."""
NOTHING = tl.constexpr(2**63 - 1)
"""Bits that no magnitude exceeds."""

_CONSTANT = tl.constexpr(1e-12)
_LEAST_SQUARE = tl.constexpr(LEAST_SQUARE)
_ROOT_OF_HALF_PI = tl.constexpr(math.sqrt(math.pi / 2))


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


@triton.jit
def _exceeded_by(wanted, tail_count, total, squares, cut, usable, RULE: tl.constexpr):
    """Return the magnitude that `wanted` entries exceed, by a fit to the entries above the cut."""
    number = tl.maximum(tail_count, 1.0)
    mean = total / number
    variance = tl.maximum(squares / number - mean * mean, 0.0)
    ratio = tl.where(usable & (wanted > 0.0), wanted / number, 1.0)
    step = exponential(mean, ratio) if RULE == "exponential" else generalized_pareto(mean, variance, ratio)
    return tl.where(usable, tl.full((), cut, tl.float64), 0.0) + step


@triton.jit
def _normal(count, total, squares, scale):
    """Return `gaussiank.fit`, of which `scale` holds what does not depend on the sums."""
    # As `fits.is_held`, of the mean square.
    held = (squares >= count * _LEAST_SQUARE) & (squares < float("inf"))
    root = total / tl.sqrt(tl.maximum(count, 1.0)) * _ROOT_OF_HALF_PI
    return tl.where(held, tl.sqrt(tl.where(held, squares, 0.0)), root) * tl.full((), scale, tl.float64)


@triton.jit(do_not_specialize=["tiles", "begin", "end", "k", "aim", "gives_up"])
def fit(
    partials,
    tiles: tl.int64,
    begin: tl.int64,
    end: tl.int64,
    k: tl.int64,
    aim: tl.int64,
    cut: tl.float64,
    most_tail: tl.float64,
    scale: tl.float64,
    given,
    floor: tl.float64,
    gives_up: tl.int32,
    histograms,
    numbers,
    words,
    HISTOGRAMS: tl.constexpr,
    RULE: tl.constexpr,
    MEASURED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add up the tiles' sums in one program, and decide what is to be selected.

    What is looked at are the entries from `begin` to `end`. RULE "nothing" selects nothing. "largest" selects the k largest
    entries. "above" selects all above `floor`, "given" all above the number at `given`. "exponential" and "gpareto" fit a
    threshold to the entries above `cut` so that `aim` of them exceed it, and select all above the threshold. They do so if the
    entries above `cut` are more than `aim` and at most the fraction `most_tail` of those that are not zero. Otherwise they
    select the k largest. "normal" selects all above a fit to all entries, times `scale`. Where sums are MEASURED, and at most
    k entries are not zero, all of these are selected, whatever the rule. Nothing is if the rank `gives_up` the step.
    """
    for start in range(0, HISTOGRAMS * HISTOGRAM, CHUNK):
        tl.store(histograms + start + tl.arange(0, CHUNK), tl.zeros([CHUNK], tl.int32))
    count, largest, tail_count, total, squares, not_finite, candidates = add_up(
        partials, tiles, gives_up, numbers, MEASURED, CHUNK
    )
    floor_bits = rounded_bits(floor)
    limit = floor_bits
    rank = tl.full((), k if RULE == "largest" else 0, tl.int64)
    few = tl.full((), False, tl.int1)
    usable = tl.full((), False, tl.int1)
    if MEASURED:
        few = count <= k.to(tl.float64)
        threshold = tl.full((), 0.0, tl.float64)
        if RULE == "given":
            usable = ~few
            threshold = tl.load(given).to(tl.float64)
        elif RULE == "normal":
            usable = ~few
            threshold = _normal(count, total, squares, scale)
        elif RULE != "largest":
            wanted = tl.minimum(aim.to(tl.float64), count - 1.0)
            usable = (tail_count > wanted) & (tail_count <= count * most_tail)
            threshold = _exceeded_by(wanted, tail_count, total, squares, cut, usable, RULE)
        # As `fits.below_largest`: the limit is at most the number just below the largest magnitude.
        below = tl.maximum(rounded_bits(largest) - 1, 0)
        # If few, there is room for everything that is not zero.
        limit = tl.where(few, 0, tl.minimum(rounded_bits(threshold), below))
        rank = tl.where(few | usable, 0, k)
    short = ((rank == 0) & (limit < floor_bits)) | (rank.to(tl.float64) > candidates)
    bad = not_finite > 0.0
    tl.store(words + FIT_LIMIT, tl.where(bad, NOTHING, limit))
    tl.store(words + FIT_SHORT, (short & ~bad).to(tl.int64))
    tl.store(words + FIT_RANK, tl.where(bad, 0, rank))
    tl.store(words + FIT_TRUSTED, (bad | few).to(tl.int64))
    tl.store(words + BEGIN, begin)
    tl.store(words + END, end)
    tl.store(numbers + ESTIMATED, (usable & ~few & ~bad).to(tl.float64))
    tl.store(numbers + FOUND, rank.to(tl.float64))
    tl.store(numbers + LOW, 0.0)
