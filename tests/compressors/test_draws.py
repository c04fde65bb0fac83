"""RandomK and RandomBlock: every entry has its chance, all ranks draw alike, and nobody else's random numbers change."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from horovod_sparse.compressors import RandomBlock, RandomK
from horovod_sparse.compressors.base import BucketState, Compressor, Place
from horovod_sparse.compressors.draws import distinct
from horovod_sparse.exchange.pairs import Pairs
from horovod_sparse.numpy.ops import NumpyOps
from tests.harness.table import ORACLE
from tests.harness.workers import make_worker, take_step

OPS = NumpyOps()
every_kind = pytest.mark.parametrize("make", [RandomK, RandomBlock])


def draw(compressor: Compressor, size: int, step: int, *, bucket: str = "b", position: int = 0) -> np.ndarray:
    state = BucketState(Place(bucket, position, 4), step=step)
    k = compressor.target_count(size)
    chosen: np.ndarray = compressor.select(OPS, np.zeros(size, np.float32), k, k, state).indices
    return chosen


@every_kind
def test_every_entry_has_the_same_chance(make: Any) -> None:
    """Chi-square: k does not divide d, and the ends are as likely as the middle."""
    size, steps = 103, 6000
    compressor = make(0.1)
    counts = np.zeros(size)
    for step in range(steps):
        counts[draw(compressor, size, step)] += 1
    expected = steps * compressor.target_count(size) / size
    # Neighbours go together in blocks: only every 10th entry is independent of the others.
    for first in range(10):
        observed = counts[first:100:10]
        chi_square = float(((observed - expected) ** 2 / expected).sum())
        assert stats.chi2.sf(chi_square, observed.size) > 1e-4
    assert counts.sum() == steps * 10


@every_kind
def test_ranks_draw_alike_or_each_for_itself(make: Any) -> None:
    shared, own = make(0.05, seed=3), make(0.05, seed=3, exchange=Pairs())
    for step in range(5):
        np.testing.assert_array_equal(draw(shared, 1000, step, position=0), draw(shared, 1000, step, position=3))
        assert not np.array_equal(draw(own, 1000, step, position=0), draw(own, 1000, step, position=3))


@every_kind
def test_draws_differ_between_steps_buckets_and_seeds(make: Any) -> None:
    # Anagrams: a seed made of the sum of a name's letters would collide.
    drawn = [draw(make(0.05), 1000, 0, bucket=bucket) for bucket in ("b", "c", "ab", "ba")]
    drawn += [draw(make(0.05), 1000, 1), draw(make(0.05, seed=1), 1000, 0)]
    assert len({one.tobytes() for one in drawn}) == len(drawn)


@every_kind
def test_other_random_numbers_are_untouched(make: Any) -> None:
    def states() -> tuple[Any, ...]:
        numpys: Any = np.random.get_state()
        return random.getstate(), numpys[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    draw(make(0.05), 1000, 0)
    assert states() == before


def test_a_block_is_contiguous_around_the_end() -> None:
    compressor = RandomBlock(0.1, warmup=None)
    wrapped = 0
    for step in range(200):
        chosen = draw(compressor, 100, step)
        runs = int((np.diff(chosen) > 1).sum()) + 1
        joined = chosen[0] == 0 and chosen[-1] == 99
        wrapped += joined
        assert runs - joined <= 1
    assert wrapped > 0


@every_kind
def test_ranks_that_draw_differently_raise(make: Any) -> None:
    """Another seed, or another version of NumPy: the values would belong to other entries."""
    workers = [
        make_worker(ORACLE, make(0.05, seed=rank, warmup=None), {"p": (1000,)}, world=2, position=rank)
        for rank in range(2)
    ]
    with pytest.raises(RuntimeError, match=r"^rank 0: .* bucket 'p'"):
        take_step(ORACLE, workers, 2 * [{"p": np.ones(1000, np.float32)}])


@pytest.mark.parametrize("numel", [9_984, 10_000, 10_047])
@pytest.mark.parametrize("k", [1, 100, 3000, 9000])
def test_numbers_that_were_drawn_before_are_drawn_again(numel: int, k: int) -> None:
    drawn = distinct(np.random.default_rng(5), numel, k)
    draws, due = np.random.default_rng(5), set[int]()
    while len(due) < min(k, numel - k):
        due.update(draws.integers(numel, size=min(k, numel - k) - len(due)).tolist())
    expected = np.setdiff1d(np.arange(numel), list(due)) if k > numel // 2 else np.sort(np.array(list(due)))
    np.testing.assert_array_equal(drawn, expected, strict=True)
