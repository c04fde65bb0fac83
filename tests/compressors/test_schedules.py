"""Ratios that change with the step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from horovod_sparse.compressors import MiCRO, RandomK, SIDCo, Threshold, TopK
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.plan import first_sparse_step, highest_ratio, rounds_of
from horovod_sparse.exchange.cost import allreduce_bytes
from horovod_sparse.public import Pairs, Union
from tests.harness.stairs import Halving


@pytest.mark.parametrize("c", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("ratio", [1.0, 0.01, 0.001])
def test_no_entry_waits_longer_than_training_is_old(ratio: float, c: float) -> None:
    compressor = TopK(ratio, warmup=c)
    ratios = [compressor.schedule.ratio(step) for step in range(5000)]
    for step, found in enumerate(ratios):
        least = min(max(ratio, c / (step + 1)), 1.0)
        assert least <= found <= max(ratio, 2**0.5 * least)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == ratio
    assert len(set(ratios)) <= 2 + 2 * np.log2(1 / ratio), "in stairs"
    step = 0
    while step < 5000:
        steps = compressor.schedule.steps_like(step)
        assert step == steps.start and set(ratios[step : steps.stop]) == {ratios[step]}, (
            "what is planned holds for a stair"
        )
        assert steps.stop >= 5000 or ratios[steps.stop] < ratios[step]
        step = steps.stop


@pytest.mark.parametrize("world", [2, 3, 8, 100])
@pytest.mark.parametrize(
    ("compressor", "numbers"),
    [
        # Numbers of 4 bytes in a message with room for one entry, and whether they go by allgather.
        (TopK(0.001), (2, True)),
        (SIDCo(0.001), (2, True)),
        (TopK(0.001, exchange=Pairs("packed")), (7 / 16, True)),
        (RandomK(0.001), (1, False)),
    ],
    ids=repr,
)
def test_a_step_is_dense_while_that_sends_fewer_bytes(
    compressor: Compressor, numbers: tuple[float, bool], world: int
) -> None:
    numel, (width, gathers) = 2**20, numbers
    first = first_sparse_step(compressor, world)
    dense = allreduce_bytes(4 * numel, world)
    for step in {0, first - 1, first} - {-1}:
        k = compressor.target_count(numel, compressor.schedule.ratio(step))
        nbytes = 4 * width * compressor.message_capacity(numel, k, world)
        sparse = (world - 1) * nbytes if gathers else allreduce_bytes(nbytes, world)
        # A bit map, or what follows the values, adds less than a tenth.
        assert sparse > 0.9 * dense if step < first else sparse <= dense
    assert highest_ratio(compressor, world) == compressor.schedule.ratio(first)


SCALED = [TopK, SIDCo, MiCRO, RandomK, partial(TopK, exchange=Union())]


@pytest.mark.parametrize("make", SCALED, ids=lambda make: repr(make(0.01)))
@pytest.mark.parametrize("ratio", [0.01, 0.001])
def test_no_warm_up_sends_more_than_dense_steps_would(make: Callable[[float], Compressor], ratio: float) -> None:
    """From a million entries on. In smaller buckets, a thousand workers' headers alone can be more."""
    compressor = make(ratio)
    for world, numel in itertools.product((16, 64, 256, 1024), (2**20, 6_553_600)):
        for stair in compressor.schedule.stairs():
            if stair.start >= first_sparse_step(compressor, world):
                rounds = rounds_of(compressor, numel, compressor.schedule.ratio(stair.start), world)
                assert sum(one.bytes_sent(world) for one in rounds) <= allreduce_bytes(4 * numel, world)


@pytest.mark.parametrize(
    "compressor",
    [TopK(0.01, warmup=None), Threshold(0.1), TopK(Halving(0.01, 0.01)), MiCRO(0.01, warmup=None), TopK(1.0)],
    ids=repr,
)
def test_without_warm_up_the_first_step_is_sparse(compressor: Compressor) -> None:
    assert first_sparse_step(compressor, 8) == 0
    assert {compressor.schedule.ratio(step) for step in range(50)} == {compressor.target_count(10**6) / 10**6}
