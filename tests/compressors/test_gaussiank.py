"""GaussianK beside the authors' loop, and how near its count is to k."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from horovod_sparse.compressors import GaussianK
from horovod_sparse.compressors.gaussiank import TOLERANCE
from horovod_sparse.numpy.ops import NumpyOps
from tests.harness.table import KINDS, gradients

OPS = NumpyOps()


class CountingOps(NumpyOps):
    """Counts the passes over the data that only look for a threshold."""

    def __init__(self) -> None:
        self.passes = 0

    def measure(self, x: Any, threshold: float = 0.0, *, with_log: bool = False) -> Any:
        self.passes += 1
        return super().measure(x, threshold, with_log=with_log)


# --- GaussianK ---


def sent_by_the_authors(u: np.ndarray, k: int) -> tuple[np.ndarray, float]:
    """What the authors' loop sends, and the threshold that it was counted at."""
    eta = -NormalDist().inv_cdf(k / u.size / 2) * np.sqrt(np.mean(u.astype(float) ** 2))
    for _ in range(3):
        counted_at, indices = eta, np.flatnonzero(np.abs(u) > np.float32(eta))
        if indices.size < 2 * k / 3:
            eta *= 0.5
        elif indices.size > 4 * k / 3:
            eta *= 1.5
        else:
            break
    return indices, counted_at


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("ratio", [0.1, 0.01])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mostly-zero"])
def test_paper_sends_what_the_authors_loop_counted_last(kind: str, ratio: float, feedback: bool) -> None:
    size, rng = 10_000, np.random.default_rng(6)
    compressor = GaussianK(ratio, refine="paper", warmup=None)
    k, residual = compressor.target_count(size), np.zeros(size, np.float32)
    state, ops = compressor.new_state(), CountingOps()
    for step in range(1, 26):
        residual = residual * feedback + gradients(kind, size, rng)
        expected, eta = sent_by_the_authors(residual, k)
        selection = compressor.select(ops, residual, k, compressor.message_capacity(size, k, 1), state)
        np.testing.assert_array_equal(selection.indices, expected)
        assert state.threshold == pytest.approx(eta, rel=1e-9)
        assert ops.passes <= 3 * step, "one to measure, two to count"
        residual[expected] = 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mostly-zero"])
@pytest.mark.parametrize("ratio", [0.1, 0.01])
def test_the_count_is_near_k_on_every_kind(kind: str, ratio: float) -> None:
    """One shot, any tail."""
    x = gradients(kind, 100_000, np.random.default_rng(7))
    compressor = GaussianK(ratio, warmup=None)
    k = compressor.target_count(x.size)
    selection = compressor.select(OPS, x, k, x.size, compressor.new_state())
    assert abs(selection.found / k - 1) <= 0.1


def test_a_step_uses_the_fit_times_what_the_steps_before_have_taught() -> None:
    size, rng = 20_000, np.random.default_rng(8)
    compressor = GaussianK(0.01, warmup=None)
    k, state = compressor.target_count(size), compressor.new_state()
    accepted = 0
    for _ in range(20):
        x, factor = gradients("laplace", size, rng), state.factor
        eta = factor * -NormalDist().inv_cdf(k / size / 2) * np.sqrt(np.mean(x.astype(float) ** 2))
        selection = compressor.select(OPS, x, k, size, state)
        above = np.flatnonzero(np.abs(x) > np.float32(eta))
        if abs(above.size - k) <= TOLERANCE * k:
            accepted += 1
            np.testing.assert_array_equal(selection.indices, above)
            assert state.threshold == pytest.approx(eta, rel=1e-6)
    assert accepted >= 15
