"""Momentum before the selection, and clipping."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from driver import exchange, make_pipeline, send
from table import BACKENDS, Backend, gradients

from horovod_sparse.compressors.momentum import Clip, MomentumCorrection
from horovod_sparse.compressors.noop import NoOp
from horovod_sparse.compressors.threshold import Threshold
from horovod_sparse.compressors.topk import TopK

on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


@on_every_backend
def test_velocities_are_saved_and_checked(backend: Backend) -> None:
    corrected = make_pipeline(backend, TopK(0.1, momentum=MomentumCorrection(), warmup=None), {"p": (300,)})
    send(backend, corrected, gradients("laplace", 300, np.random.default_rng(4)))
    plain = make_pipeline(backend, TopK(0.1, warmup=None), {"p": (300,)})
    with pytest.raises(ValueError, match=r"velocities must be .*unexpected: \['p'\].*same momentum"):
        plain.load_state_dict(corrected.state_dict())
    with pytest.raises(ValueError, match=r"velocities must be .*missing: \['p'\]"):
        corrected.load_state_dict(plain.state_dict())


@on_every_backend
def test_half_precision_is_clipped_after_it_is_widened(backend: Backend) -> None:
    """A small factor would flush most of it to zero."""
    gradient = gradients("laplace", 400, np.random.default_rng(9)).astype(np.float16)
    pipeline = make_pipeline(backend, NoOp(clip=1e-6), {"p": (400,)})
    pipeline.arrive("p", backend.array(gradient))
    wide = gradient.astype(np.float64)
    kept = backend.numpy(pipeline.buckets[0].buffer)
    np.testing.assert_allclose(kept, wide * 1e-6 / np.linalg.norm(wide), rtol=1e-5)


@on_every_backend
@pytest.mark.parametrize(("world", "averages"), [(1, True), (4, True), (4, False)])
def test_clipping_bounds_the_local_norm(backend: Backend, world: int, averages: bool) -> None:
    compressor = NoOp(clip=3.0)
    gradient = gradients("laplace", 400, np.random.default_rng(5)).reshape(20, 20)
    limit = 3.0 * math.sqrt(world) if averages else 3.0 / math.sqrt(world)
    for scale, clipped in ((100.0, True), (1e-3, False)):
        pipeline = make_pipeline(backend, compressor, {"p": (20, 20)}, world=world, averages=averages)
        given = backend.array(gradient * np.float32(scale))
        pipeline.arrive("p", given)
        kept = backend.numpy(pipeline.buckets[0].buffer)
        expected = gradient.reshape(-1) * scale
        if clipped:
            expected *= limit / np.linalg.norm(expected)
        np.testing.assert_allclose(kept, expected, rtol=1e-5)
        np.testing.assert_array_equal(backend.numpy(given), gradient * np.float32(scale))


@on_every_backend
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_entries_that_are_not_finite_do_not_hinder_clipping(backend: Backend, bad: float, scope: Any) -> None:
    gradient = 100 * gradients("laplace", 400, np.random.default_rng(5))
    gradient[7] = bad
    finite = np.where(np.isfinite(gradient), gradient, 0)
    compressor = NoOp(clip=Clip(3.0, scope), not_finite="propagate")
    pipeline = make_pipeline(backend, compressor, {"p": (400,)})
    given = backend.array(gradient)
    pipeline.start_step([given])
    bucket = pipeline.arrive("p", given)
    assert bucket is not None and not bucket.finite
    expected = finite * (3.0 / np.linalg.norm(finite.astype(np.float64)))
    np.testing.assert_allclose(backend.numpy(bucket.buffer), expected, rtol=1e-5)


@on_every_backend
def test_gradients_whose_squares_overflow_are_clipped_too(backend: Backend) -> None:
    gradient = 1e160 * np.random.default_rng(3).laplace(size=400)
    for scope in ("layer", "model"):
        pipeline = make_pipeline(backend, NoOp(clip=Clip(3.0, scope)), {"p": (400,)}, dtype="float64")
        given = backend.array(gradient)
        pipeline.start_step([given])
        pipeline.arrive("p", given)
        kept = backend.numpy(pipeline.buckets[0].buffer)
        np.testing.assert_allclose(np.linalg.norm(kept), 3.0, rtol=1e-12)


@on_every_backend
def test_a_given_threshold_is_in_units_of_the_first_rate(backend: Backend) -> None:
    """It also follows the scale of the loss."""
    pipeline = make_pipeline(backend, Threshold(1.0, lr_in_residual=True), {"p": (50,), "q": (50,)})
    rng = np.random.default_rng(15)
    pipeline.rescale(4.0)
    for rates, expected in (
        ((0.0, 0.0), 4.0),
        ((0.1, 0.4), 1.6),
        ((0.1, 0.1), 1.6),
        ((0.0, 0.0), 1.6),
        ((0.8, 0.8), 1.6),
    ):
        for name, rate in zip(("p", "q"), rates, strict=True):
            bucket = pipeline.arrive(name, backend.array(gradients("laplace", 50, rng)), rate)
        assert bucket is not None
        exchange(backend, [pipeline], [bucket])
        pipeline.end_step()
        assert bucket.state.threshold == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"momentum": -0.1}, r"momentum must be in \[0, 1\), got -0.1"),
        ({"nesterov": 1}, "nesterov must be True or False, got 1"),
        ({"masking": None}, "masking must be True or False, got None"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        MomentumCorrection(**arguments)


def test_a_gradient_is_rounded_alike_at_rate_zero_and_at_any_other() -> None:
    """Its float64 entries go into a velocity of float32."""
    backend, given = BACKENDS[0], np.random.default_rng(3).laplace(size=(2, 300))
    settings: Any = {"momentum": MomentumCorrection(0.9, masking=False), "lr_in_residual": True, "warmup": None}
    velocities = []
    for rate in (0.5, 0.0):
        pipeline = make_pipeline(backend, TopK(0.1, **settings), {"p": (300,)})
        for gradient, learning_rate in zip(given, (0.5, rate), strict=True):
            pipeline.arrive("p", gradient, learning_rate)
            exchange(backend, [pipeline], [pipeline.buckets[0]])
            pipeline.end_step()
        velocities.append(pipeline.state_dict()["velocities"]["p"])
    np.testing.assert_array_equal(*velocities)
