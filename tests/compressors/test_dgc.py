"""DGC's threshold from a sample, beside exact top-k."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_sparse.compressors import DGC, TopK
from horovod_sparse.numpy.ops import NumpyOps
from tests.harness.table import BACKENDS, gradients
from tests.harness.workers import make_worker, send

OPS = NumpyOps()


# --- DGC ---


def test_dgc_without_momentum_is_sampled_top_k_with_feedback() -> None:
    """With a sample of everything the threshold is the exact k-th largest, which is itself not above it."""
    backend, rng = BACKENDS[0], np.random.default_rng(2)
    sampled = make_worker(backend, DGC(0.01, momentum=0.0, sample_ratio=1.0, warmup=None), {"p": (5000,)})
    exact = make_worker(backend, TopK(0.01, warmup=None), {"p": (5000,)})
    for _ in range(8):
        gradient = gradients("laplace", 5000, rng)
        got, expected = send(backend, sampled, gradient), send(backend, exact, gradient)
        left_out = np.setdiff1d(expected.indices, got.indices)
        assert set(got.indices) <= set(expected.indices) and left_out.size == 1
        # The same input again for both.
        exact.buckets[0].buffer[:] = sampled.buckets[0].buffer


def test_dgc_takes_the_exact_top_k_of_too_many() -> None:
    """Half of the entries stand where the sample does not look: it finds too low a threshold."""
    rng = np.random.default_rng(3)
    compressor = DGC(0.01, momentum=0.0, warmup=None)
    found = 0
    for step in range(60):
        x = gradients("two-scales", 20_000, rng)
        state = compressor.new_state()
        state.step = step
        selection = compressor.select(OPS, x, 200, 260, state)
        assert selection.indices.size <= 260
        if selection.indices.size == 200:
            found += 1
            np.testing.assert_array_equal(selection.indices, OPS.select_largest(x, 200).indices)
    assert found > 3


def test_dgc_samples_in_odd_strides_from_changing_starts() -> None:
    """An even stride locks on to the rows of a layer; one start never sees the other entries."""
    seen: list[np.ndarray] = []

    class SpyingOps(NumpyOps):
        def kth_largest(self, x: Any, count: int) -> float:
            seen.append(x.copy())
            return super().kth_largest(x, count)

    x = np.arange(1, 100_001, dtype=np.float32)
    compressor = DGC(0.01, momentum=0.0, warmup=None)
    for step in range(5):
        state = compressor.new_state()
        state.step = step
        compressor.select(SpyingOps(), x, 1000, 1300, state)
    assert len({float(sample[0]) for sample in seen}) > 2
    for sample in seen:
        assert set(np.diff(sample)) == {99.0} and sample.size > 1000
