"""MiCRO: parts that get as many entries each, no build-up, and a threshold that finds its way from any scale."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from horovod_sparse.compressors.base import Place
from horovod_sparse.compressors.micro import MiCRO, MiCROState
from horovod_sparse.estimation.controllers import next_threshold
from horovod_sparse.numpy.ops import NumpyOps
from tests.harness.table import ORACLE, gradients
from tests.harness.worker import Worker
from tests.harness.workers import make_workers, take_step


def step(workers: list[Worker], gradient: Callable[[], np.ndarray]) -> np.ndarray:
    """One step of all workers, each with a gradient of its own; the indices that were sent."""
    parts = take_step(ORACLE, workers, [{"p": gradient()} for _ in workers])[0]["p"]
    assert parts is not None
    return parts[0][0]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("numel", [1, 5, 10, 64, 1000])
def test_parts_are_disjoint_cover_everything_and_go_round(numel: int, world: int) -> None:
    """In P steps each rank owns each entry once."""
    compressor = MiCRO(1.0, warmup=None)
    owned = np.zeros((world, numel), int)
    for number, rank in itertools.product(range(world), repeat=2):
        state = compressor.new_state(Place("b", rank, world))
        state.step, state.current = number, 0.5
        owned[rank, compressor.select(NumpyOps(), np.ones(numel, np.float32), numel, numel, state).indices] += 1
    assert (owned == 1).all()


@pytest.mark.parametrize(("ratio", "scale"), [(0.1, 1e-6), (0.01, 1e6)])
def test_mean_count_from_any_scale(scale: float, ratio: float) -> None:
    """Within 3 % of k after 200 steps."""
    world, size = 4, 20_000
    compressor = MiCRO(ratio, warmup=None)
    workers = make_workers(ORACLE, compressor, {"p": (size,)}, world)
    rng = np.random.default_rng(1)
    counts = [step(workers, lambda: gradients("laplace", size, rng) * np.float32(scale)).size for _ in range(400)]
    assert np.mean(counts[200:]) == pytest.approx(ratio * size, rel=0.03)


def test_paper_scaling_never_lowers_the_threshold_within_the_band() -> None:
    for x, factor in ((1.5, 1.005), (1.05, 1.00125), (0.95, 1.00125), (0.8, 0.995), (10.0, 1.005), (0.0, 0.995)):
        assert next_threshold("paper", 2.0, 0.0, round(1000 * x), 1000)[0] == pytest.approx(2.0 * factor)


def test_two_sided_scaling() -> None:
    for x, with_excess in ((1.0, 1.0), (1.05, 1.055), (0.95, 0.945), (1.5, 1.55), (3.0, 3.2), (9.0, 4.0), (0.0, 0.25)):
        threshold, _ = next_threshold("two_sided", 2.0, 0.0, round(1000 * x), 1000)
        assert threshold == pytest.approx(2.0 * with_excess**0.02), x


def test_a_threshold_that_is_far_too_low_starts_again() -> None:
    """After gradients of almost only zeros the threshold has no floor to stand on."""
    compressor = MiCRO(0.1, warmup=None)
    workers = make_workers(ORACLE, compressor, {"p": (2000,)}, workers=2)
    rng = np.random.default_rng(3)
    counts = []
    for kind, steps in (("laplace", 20), ("mostly-zero", 180), ("laplace", 60)):
        counts += [step(workers, partial(gradients, kind, 2000, rng)).size for _ in range(steps)]
    assert np.mean(counts[100:200]) < 100
    assert np.mean(counts[210:]) == pytest.approx(200, rel=0.25)


@pytest.mark.parametrize("scaling", ["two_sided", "paper"])
def test_with_more_workers_than_k_the_threshold_does_not_run_away(scaling: Any) -> None:
    """Every worker sends one entry at least, so the count is above k for ever. No residual grows meanwhile."""
    compressor = MiCRO(0.001, scaling=scaling, residual=False, warmup=None)
    workers = make_workers(ORACLE, compressor, {"p": (900,)}, workers=4)
    rng, thresholds = np.random.default_rng(4), []
    for _ in range(300):
        step(workers, lambda: gradients("laplace", 900, rng))
        state = workers[0].buckets[0].state
        assert isinstance(state, MiCROState)
        thresholds.append(state.current)
    assert 0.0 < thresholds[0] <= thresholds[-1] < 2.0 * thresholds[0]


def test_room_is_a_workers_share() -> None:
    assert MiCRO(0.1, warmup=None).message_capacity(1000, 100, 4) == 50
    assert MiCRO(0.1, slack=1.5, warmup=None).message_capacity(1000, 100, 4) == 38
    assert MiCRO(1.0, warmup=None).message_capacity(1000, 1000, 4) == 250, "not more than the part"
    assert MiCRO(0.001, warmup=None).message_capacity(10, 1, 4) == 1
