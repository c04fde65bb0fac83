"""SIDCo beyond the common laws: what the fits and stages promise on data of known distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.special import gammaln

from horovod_sparse.compressors.sidco import FIRST_RATIO, SIDCo, SIDCoState
from horovod_sparse.estimation import fits
from horovod_sparse.estimation.controllers import StageController
from horovod_sparse.numpy.ops import NumpyOps
from tests.harness.table import KINDS, Backend, gradients, on_every_backend
from tests.harness.workers import make_worker, send

OPS = NumpyOps()
SIZE = 1_000_000


def estimate(x: np.ndarray, ratio: float, stages: int, distribution: Any, adapt: Any = "robust") -> float:
    """The threshold of a first step, which fits all stages."""
    compressor = SIDCo(ratio, stages=stages, distribution=distribution, adapt=adapt, warmup=None)
    state = compressor.new_state()
    compressor.select(OPS, x, compressor.target_count(x.size), x.size, state)
    return state.threshold


@pytest.fixture(scope="module")
def laplace() -> np.ndarray:
    return np.random.default_rng(0).laplace(size=SIZE).astype(np.float32)


@pytest.mark.parametrize("distribution", ["exponential", "gamma", "gpareto"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("adapt", ["paper", "robust"])
def test_any_number_of_stages_agrees_on_exponential_data(
    laplace: np.ndarray, distribution: str, stages: int, ratio: float, adapt: str
) -> None:
    threshold = estimate(laplace, ratio, stages, distribution, adapt)
    count = np.count_nonzero(np.abs(laplace) > threshold)
    # Gamma with one stage is off by its approximate shape (0.5 %); the rest is sampling error.
    assert count / (ratio * SIZE) == pytest.approx(1.0, abs=0.03 + 2 / np.sqrt(ratio * SIZE))


def published_threshold(magnitudes: np.ndarray, ratio: float, stages: int, distribution: str) -> float:
    """The paper's estimator, on magnitudes of which none is zero, without any safeguard."""

    def tail(excesses: np.ndarray, part: float) -> float:
        mean, level = excesses.mean(), np.log(1 / part)
        if distribution == "exponential":
            return mean * level
        shape = (1 - mean**2 / excesses.var()) / 2
        return mean * (mean**2 / excesses.var() + 1) / 2 * (np.exp(shape * level) - 1) / shape

    def first(part: float) -> float:
        if distribution != "gamma":
            return tail(magnitudes, part)
        s = np.log(magnitudes.mean()) - np.log(magnitudes).mean()
        shape = (3 - s + np.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
        return -magnitudes.mean() / shape * (np.log(part) + gammaln(shape))

    if stages == 1:
        return first(ratio)
    threshold = first(0.25)
    for _ in range(stages - 1):
        limit = np.float32(threshold)  # The precision of the comparison: one entry more or less shows.
        above = magnitudes[magnitudes > limit]
        threshold += tail(above - limit, (ratio / 0.25) ** (1 / (stages - 1)))
    return threshold


def published_stages(stages: int, window: list[float], most: int) -> int:
    mean = float(np.mean(window))
    return min(max(stages + (mean < 0.8) - (mean > 1.2), 1), most)


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("distribution", ["exponential", "gamma", "gpareto"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mostly-zero"])
def test_paper_is_the_published_estimator(kind: str, distribution: Any, feedback: bool) -> None:
    """Step by step the same threshold and number of stages, from one stage on, whatever that does to the count."""
    size, rng = 10_000, np.random.default_rng(10)
    for ratio, most in ((0.1, 4), (0.01, 7)):
        compressor = SIDCo(ratio, distribution=distribution, adapt="paper", warmup=None)
        k = compressor.target_count(size)
        state, residual = compressor.new_state(), np.zeros(size, np.float32)
        stages, window = 1, []
        for _ in range(25):
            residual = residual * feedback + gradients(kind, size, rng)
            magnitudes = np.abs(residual[residual != 0]).astype(np.float64)
            expected = published_threshold(magnitudes, k / magnitudes.size, stages, distribution)
            selection = compressor.select(OPS, residual, k, compressor.message_capacity(size, k, 1), state)
            assert state.stages == stages
            # One entry is sent, the largest, where all are below the threshold.
            assert state.threshold == pytest.approx(min(expected, magnitudes.max()), rel=1e-5)
            assert selection.indices.size == selection.found, "its default room holds it"
            window.append(selection.found / k)
            if len(window) == 5:
                stages, window = published_stages(stages, window, most), []
            residual[selection.indices] = 0


@pytest.mark.parametrize("distribution", ["exponential", "gamma", "gpareto"])
@pytest.mark.parametrize(
    ("parts", "k", "stage", "found"),
    [
        ({1.0: 29, 1e30: 5}, 6, 1, 5),
        ({1.0: 29, 1e30: 1}, 1, 1, 1),
        ({0.1: 88, 4.0: 10, 100.0: 2}, 6, 1, 12),
        ({0.1: 88, 8.0: 8, 100.0: 4}, 6, 2, 4),
    ],
    ids=["first leaves fewer", "first leaves k", "first is nearer", "second is nearer"],
)
def test_a_stage_that_leaves_no_more_than_k_entries_is_the_last(
    distribution: Any, parts: dict[float, int], k: int, stage: int, found: int
) -> None:
    x = np.repeat(np.array(list(parts), np.float32), list(parts.values()))
    compressor, sums = (
        SIDCo(k / x.size, stages=3, distribution=distribution, warmup=None),
        OPS.measure(x, with_log=True),
    )
    first = {
        "exponential": fits.exponential(sums.mean, FIRST_RATIO),
        "gamma": fits.gamma(sums.mean, sums.mean_log, FIRST_RATIO),
        "gpareto": fits.generalized_pareto(sums.mean, sums.variance, FIRST_RATIO),
    }
    state = compressor.new_state()
    assert compressor.select(OPS, x, k, x.size, state).found == found
    assert (state.threshold == pytest.approx(first[distribution])) == (stage == 1)


def test_zeros_do_not_take_part_in_the_fit() -> None:
    x = gradients("laplace", 100_000, np.random.default_rng(4))
    padded = np.concatenate((x, np.zeros(900_000, np.float32)))
    for distribution in ("exponential", "gamma", "gpareto"):
        for stages in (1, 3):
            assert estimate(padded, 0.001, stages, distribution) == pytest.approx(
                estimate(x, 0.01, stages, distribution), rel=1e-12
            )


@pytest.mark.parametrize("distribution", ["exponential", "gamma", "gpareto"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_data_floods_or_starves(kind: str, distribution: Any) -> None:
    """The safeguard holds every single step, raw and with feedback, also with one fixed stage."""
    rng = np.random.default_rng(5)
    for stages in (1, "auto"):
        compressor = SIDCo(0.01, distribution=distribution, stages=stages, slack=4.0, warmup=None)
        state = compressor.new_state()
        k = compressor.target_count(20_000)
        residual = np.zeros(20_000, np.float32)
        for _ in range(40):
            residual += gradients(kind, 20_000, rng)
            selection = compressor.select(OPS, residual, k, compressor.message_capacity(20_000, k, 1), state)
            assert k / 2 <= selection.found <= 2 * k
            residual[selection.indices] = 0


def test_stages_adapt_until_the_estimate_is_trusted() -> None:
    """One exponential stage starves under error feedback; the controller must end the need for the safeguard."""
    counts: list[int] = []
    replaced: list[int] = []

    class SpyingOps(NumpyOps):
        def select_largest(self, x: Any, count: int) -> Any:
            replaced.append(len(counts))
            return super().select_largest(x, count)

    rng = np.random.default_rng(7)
    compressor = SIDCo(0.001, warmup=None)
    state = SIDCoState(controller=StageController("robust", 1))
    residual = np.zeros(200_000, np.float32)
    while len(counts) < 80:
        residual += gradients("laplace", residual.size, rng)
        selection = compressor.select(SpyingOps(), residual, 200, 250, state)
        counts.append(selection.found)
        residual[selection.indices] = 0
    assert state.controller.stages >= 3
    assert len(replaced) > 2 and max(replaced) < 40, replaced


def test_a_fixed_number_of_stages_outlives_a_loaded_state() -> None:
    state = SIDCo(0.001, stages=1, warmup=None).new_state()
    state.load_state_dict(state.state_dict() | StageController("robust", 4).state_dict())
    SIDCo(0.001, stages=1, warmup=None).select(
        OPS, gradients("laplace", 10_000, np.random.default_rng(8)), 10, 13, state
    )
    assert state.stages == 1


def test_nothing_is_learnt_from_a_bucket_with_room_for_all_that_is_not_zero() -> None:
    compressor = SIDCo(0.01, warmup=None)
    state = compressor.new_state()
    x = np.zeros(10_000, np.float32)
    x[:40] = np.arange(1, 41)
    for _ in range(30):
        assert compressor.select(OPS, x, 100, 125, state).indices.tolist() == list(range(40))
    assert state.controller == compressor.new_state().controller and state.threshold == 0.0


@pytest.mark.parametrize(("found", "power"), [(850, 0.1), (1100, 0.1), (700, 0.5), (1500, 0.5)])
def test_the_aim_follows_a_count_that_is_far_from_k_faster(found: int, power: float) -> None:
    compressor = SIDCo(0.01, warmup=None)
    state = compressor.new_state()
    compressor.learn(state, 1000, 100_000, 1000, found)
    assert state.aim == pytest.approx((1000 / found) ** power)


@on_every_backend
@pytest.mark.parametrize("adapt", ["paper", "robust"])
@pytest.mark.parametrize("distribution", ["exponential", "gamma", "gpareto"])
def test_sums_that_overflow_do_not_stop_it(backend: Backend, distribution: Any, adapt: Any) -> None:
    compressor = SIDCo(0.1, distribution=distribution, adapt=adapt, min_numel=0, warmup=None)
    worker = make_worker(backend, compressor, {"p": (50,)}, dtype="float64")
    rng = np.random.default_rng(15)
    for _ in range(3):
        sent = send(backend, worker, rng.uniform(0.1, 1.0, 50) * 1.7e308)
        assert sent.indices.size >= (1 if adapt == "paper" else 5)
        worker.buckets[0].buffer[:] = 0.0


@pytest.mark.parametrize("distribution", ["exponential", "gamma", "gpareto"])
@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
def test_the_last_stage_alone_estimates_as_well_as_all(laplace: np.ndarray, distribution: Any, ratio: float) -> None:
    """And its cut stays where stage M-1 ends."""
    compressor, k = SIDCo(ratio, distribution=distribution, stages=3, warmup=None), int(ratio * SIZE)
    state = compressor.new_state()
    for step in range(6):
        selection = compressor.select(OPS, laplace, k, SIZE, state)
        assert selection.found / k == pytest.approx(1.0, abs=0.05 + 2 / np.sqrt(k)), step
        left = np.count_nonzero(np.abs(laplace) > state.cut) / SIZE
        assert left == pytest.approx(np.sqrt(0.25 * ratio), rel=0.25), step


def test_a_cut_that_leaves_too_few_or_too_many_is_given_up(laplace: np.ndarray) -> None:
    for factor in (1e-3, 1e3):
        compressor = SIDCo(0.01, stages=3, warmup=None)
        state = compressor.new_state()
        compressor.select(OPS, laplace, 10_000, SIZE, state)
        x = laplace * np.float32(factor)
        assert compressor.select(OPS, x, 10_000, SIZE, state).found == pytest.approx(10_000, rel=0.1)
        assert state.cut == pytest.approx(-factor * np.log(np.sqrt(0.25 * 0.01)), rel=0.1)


@pytest.mark.parametrize("distribution", ["exponential", "gpareto"])
@pytest.mark.parametrize("kind", ["laplace", "gaussian", "student"])
def test_the_count_follows_gradients_that_become_a_hundred_times_smaller(kind: str, distribution: Any) -> None:
    """What the residual holds then has another tail than before."""
    rng, size, k, truncated = np.random.default_rng(12), 100_000, 1000, 0
    compressor, residual = SIDCo(0.01, distribution=distribution, warmup=None), np.zeros(size, np.float32)
    state, counts = compressor.new_state(), []
    for step in range(140):
        residual += gradients(kind, size, rng) * np.float32(1.0 if step < 100 else 0.01)
        selection = compressor.select(OPS, residual, k, 1250, state)
        residual[selection.indices] = 0
        if step >= 100:
            counts.append(selection.indices.size / k)
            truncated += selection.found > 1250
    assert truncated <= 7
    assert np.mean(counts[:20]) <= 1.14 and 0.9 <= np.mean(counts[20:]) <= 1.1


@pytest.mark.parametrize("distribution", ["exponential", "gpareto", "gamma"])
def test_about_as_many_entries_as_are_wanted_are_not_zero(distribution: Any) -> None:
    """What is left of earlier steps is much smaller than what is new: no distribution fits both."""
    rng, size, counts = np.random.default_rng(13), 100_000, []
    compressor, residual = SIDCo(0.01, distribution=distribution, warmup=None), np.zeros(size, np.float32)
    state = compressor.new_state()
    for _ in range(200):
        residual += gradients("mostly-zero", size, rng)
        indices = compressor.select(OPS, residual, 1000, 1250, state).indices
        residual[indices] = 0
        counts.append(indices.size / 1000)
    assert 0.92 <= np.mean(counts[100:]) <= 1.05
