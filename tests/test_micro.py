"""MiCRO: partitions, no build-up, and a threshold that finds its way from any scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from driver import exchange, make_pipeline
from table import BACKENDS, gradients

from horovod_sparse.compressors.base import Place
from horovod_sparse.compressors.micro import MiCRO, MiCROState, part
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.estimation.controllers import ThresholdController
from horovod_sparse.numpy.ops import NumpyOps

NUMPY = BACKENDS[0]


def workers(compressor: MiCRO, size: int, world: int) -> list[Pipeline]:
    return [make_pipeline(NUMPY, compressor, {"p": (size,)}, world=world, position=rank) for rank in range(world)]


def step(pipelines: list[Pipeline], gradient: Callable[[], np.ndarray]) -> np.ndarray:
    """One step of all workers, each with a gradient of its own; the indices that were sent."""
    for pipeline in pipelines:
        pipeline.arrive("p", gradient())
    parts = exchange(NUMPY, pipelines, [pipeline.buckets[0] for pipeline in pipelines])[0]["p"]
    assert parts is not None
    for pipeline in pipelines:
        pipeline.end_step()
    return parts[0][0]


def test_known_partition() -> None:
    assert [part(10, 4, number) for number in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("numel", [1, 5, 10, 64, 1000])
def test_parts_are_disjoint_cover_everything_and_go_round(numel: int, world: int) -> None:
    """In P steps each rank owns each entry once."""
    owned = np.zeros((world, numel), int)
    for number in range(world):
        in_this_step = np.zeros(numel, int)
        for rank in range(world):
            start, end = part(numel, world, (number + rank) % world)
            in_this_step[start:end] += 1
            owned[rank, start:end] += 1
        assert (in_this_step == 1).all()
    assert (owned == 1).all()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_no_build_up_and_equal_states(world: int) -> None:
    """The union has as many entries as the parts together; states are the same on all ranks, bit for bit."""
    compressor = MiCRO(0.05)
    pipelines = workers(compressor, 3000, world)
    rng = np.random.default_rng(0)
    selected: list[int] = []
    real = MiCRO.select

    def counted(*arguments: Any) -> Any:
        selection = real(*arguments)
        selected.append(len(selection.indices))
        return selection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MiCRO, "select", counted)
        for _ in range(50):
            selected.clear()
            sent = step(pipelines, lambda: gradients("laplace", 3000, rng))
            assert sent.size == sum(selected)
            states = [pipeline.buckets[0].state.state_dict() for pipeline in pipelines]
            assert all(state == states[0] for state in states)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("ratio", [0.1, 0.01])
def test_mean_count_from_any_scale(scale: float, ratio: float) -> None:
    """Within 3 % of k after 200 steps."""
    world, size = 4, 20_000
    compressor = MiCRO(ratio)
    pipelines = workers(compressor, size, world)
    rng = np.random.default_rng(1)
    counts = []
    for _ in range(400):
        counts.append(step(pipelines, lambda: gradients("laplace", size, rng) * np.float32(scale)).size)
    assert np.mean(counts[200:]) == pytest.approx(ratio * size, rel=0.03)


def test_paper_scaling_never_lowers_the_threshold_within_the_band() -> None:
    for x, factor in ((1.5, 1.005), (1.05, 1.00125), (0.95, 1.00125), (0.8, 0.995), (10.0, 1.005), (0.0, 0.995)):
        controller = ThresholdController("paper", 2.0)
        controller.observe(round(1000 * x), 1000)
        assert controller.threshold == pytest.approx(2.0 * factor)


def test_two_sided_scaling() -> None:
    for x, with_excess in ((1.0, 1.0), (1.05, 1.055), (0.95, 0.945), (1.5, 1.55), (3.0, 3.2), (9.0, 4.0), (0.0, 0.25)):
        controller = ThresholdController("two_sided", 2.0)
        controller.observe(round(1000 * x), 1000)
        assert controller.threshold == pytest.approx(2.0 * with_excess**0.02), x


def test_steps_to_a_threshold_ten_times_as_large() -> None:
    controller, steps = ThresholdController("paper", 1.0), 0
    while controller.threshold < 10.0:
        controller.observe(2, 1)
        steps += 1
    assert steps == 462


def test_the_excess_is_made_good() -> None:
    """After too many the threshold still rises when the count is right."""
    controller = ThresholdController("two_sided", 1.0)
    for _ in range(5):
        controller.observe(150, 100)
    before = controller.threshold
    controller.observe(100, 100)
    assert controller.threshold > before and controller.excess == pytest.approx(2.5)


def test_another_world_size_takes_the_threshold_over() -> None:
    compressor = MiCRO(0.1)
    pipelines = workers(compressor, 2000, 4)
    rng = np.random.default_rng(2)
    for _ in range(20):
        step(pipelines, lambda: gradients("laplace", 2000, rng))
    resumed = workers(compressor, 2000, 3)
    for pipeline in resumed:
        pipeline.load_state_dict(pipelines[0].state_dict())
    covered = np.zeros(2000, bool)
    for _ in range(3):
        for pipeline in resumed:
            assert isinstance(pipeline.buckets[0].state, MiCROState) and pipeline.buckets[0].state.current > 0
        covered[step(resumed, lambda: gradients("laplace", 2000, rng))] = True
    assert covered[:700].any() and covered[700:1400].any() and covered[1400:].any()


def test_an_empty_part_selects_nothing() -> None:
    """More workers than entries: some have no part."""
    state = MiCRO(0.5).new_state(Place("b", 3, 5))
    assert MiCRO(0.5).select(NumpyOps(), np.ones(2, np.float32), 1, 1, state).indices.size == 0


def test_each_worker_selects_from_its_own_part_and_the_parts_go_round() -> None:
    world, size = 3, 90
    compressor = MiCRO(0.1)
    for number in range(7):
        for rank in range(world):
            state = compressor.new_state(Place("b", rank, world))
            state.step = number
            chosen = compressor.select(NumpyOps(), np.ones(size, np.float32), 9, 6, state).indices
            start = 30 * ((number + rank) % 3)
            assert chosen.tolist() == list(range(start, start + 3)), "its share, the first among equals"


def test_the_first_threshold_is_the_mean_of_those_that_have_one() -> None:
    state = MiCRO(0.1).new_state()
    MiCRO(0.1).observe(state, 10, 10, [1.0, 0.0, 4.0])
    assert state.current == 2.5


def test_a_threshold_that_is_far_too_low_starts_again() -> None:
    """After gradients of almost only zeros the threshold has no floor to stand on."""
    compressor = MiCRO(0.1)
    pipelines = workers(compressor, 2000, 2)
    rng = np.random.default_rng(3)
    counts = []
    for kind, steps in (("laplace", 20), ("mostly-zero", 180), ("laplace", 60)):
        counts += [step(pipelines, lambda kind=kind: gradients(kind, 2000, rng)).size for _ in range(steps)]
    assert np.mean(counts[100:200]) < 100
    assert np.mean(counts[210:]) == pytest.approx(200, rel=0.25)


@pytest.mark.parametrize("scaling", ["two_sided", "paper"])
def test_with_more_workers_than_k_the_threshold_stays_finite(scaling: str) -> None:
    """Every worker sends one entry at least, so the count is above k for ever."""
    compressor = MiCRO(0.001, scaling=scaling)
    pipelines = workers(compressor, 900, 4)
    rng = np.random.default_rng(4)
    for _ in range(3000):
        step(pipelines, lambda: gradients("laplace", 900, rng))
    state = pipelines[0].buckets[0].state
    assert isinstance(state, MiCROState) and 0 < state.current < 1e4


def test_room_is_a_workers_share() -> None:
    assert MiCRO(0.1).message_capacity(1000, 100, 4) == 50
    assert MiCRO(0.1, slack=1.5).message_capacity(1000, 100, 4) == 38
    assert MiCRO(1.0).message_capacity(1000, 1000, 4) == 250, "not more than the part"
    assert MiCRO(0.001).message_capacity(10, 1, 4) == 1
