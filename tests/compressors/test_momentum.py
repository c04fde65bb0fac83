"""Momentum before the selection, and clipping."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from horovod_sparse.compressors import NoOp, TopK
from horovod_sparse.compressors.momentum import MomentumCorrection
from tests.harness.table import BACKENDS, Backend, gradients, on_every_backend
from tests.harness.workers import dense_sum, make_worker, take_step

LAPLACE = gradients("laplace", 400, np.random.default_rng(5)).reshape(20, 20)
CLIPPED: dict[str, tuple[np.ndarray, float]] = {
    "large": (100 * LAPLACE, 3.0),
    "small": (np.float32(1e-3) * LAPLACE, 3.0),
    # A small factor would flush most of it to zero before it is widened.
    "half": (LAPLACE.astype(np.float16), 1e-6),
    "squares overflow": (1e160 * LAPLACE.astype(np.float64), 3.0),
    **{
        str(bad): (np.where(np.arange(20) == 7, np.float32(bad), 100 * LAPLACE), 3.0)
        for bad in (np.nan, np.inf, -np.inf)
    },
}


@on_every_backend
@pytest.mark.parametrize(("world", "averages"), [(1, True), (4, True), (4, False)])
@pytest.mark.parametrize(("gradient", "clip"), CLIPPED.values(), ids=CLIPPED)
def test_clipping_bounds_the_local_norm_of_what_is_finite(
    backend: Backend, gradient: np.ndarray, clip: float, world: int, averages: bool
) -> None:
    dtype = "float64" if gradient.dtype == np.float64 else "float32"
    worker = make_worker(backend, NoOp(clip=clip), {"p": (20, 20)}, world=world, averages=averages, dtype=dtype)
    given = backend.array(gradient)
    bucket = worker.arrive("p", given)
    assert bucket is not None and bucket.finite == np.isfinite(gradient).all()
    wide = np.where(np.isfinite(gradient), gradient, 0).astype(np.float64).reshape(-1)
    largest = np.abs(wide).max()
    limit = clip * math.sqrt(world) if averages else clip / math.sqrt(world)
    expected = wide * min(1.0, limit / largest / np.linalg.norm(wide / largest))
    np.testing.assert_allclose(backend.numpy(bucket.buffer), expected, rtol=1e-5)
    np.testing.assert_array_equal(backend.numpy(given), gradient)


@on_every_backend
def test_what_is_added_is_the_velocity(backend: Backend) -> None:
    """`U = m U + G`. All of it is sent in each step."""
    correction, rng = MomentumCorrection(0.5, masking=False), np.random.default_rng(4)
    worker, velocity = make_worker(backend, NoOp(momentum=correction), {"p": (50,)}), np.zeros(50, np.float32)
    for _ in range(3):
        gradient = gradients("laplace", 50, rng)
        velocity = velocity * np.float32(0.5) + gradient
        (reduced,) = take_step(backend, [worker], [{"p": gradient}])
        np.testing.assert_allclose(dense_sum(reduced["p"], 50), velocity, rtol=1e-6, atol=1e-6)


def test_a_gradient_is_rounded_alike_at_rate_zero_and_at_any_other() -> None:
    """Its float64 entries go into a velocity of float32."""
    backend, given = BACKENDS[0], np.random.default_rng(3).laplace(size=(2, 300))
    settings: Any = {"momentum": MomentumCorrection(0.9, masking=False), "lr_in_residual": True, "warmup": None}
    velocities = []
    for rate in (0.5, 0.0):
        worker = make_worker(backend, TopK(0.1, **settings), {"p": (300,)})
        for gradient, learning_rate in zip(given, (0.5, rate), strict=True):
            take_step(backend, [worker], [{"p": gradient}], learning_rate)
        velocities.append(worker.state_dict()["velocities"]["p"])
    np.testing.assert_array_equal(*velocities)
