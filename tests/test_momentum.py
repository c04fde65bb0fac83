"""Momentum before the selection, and clipping."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from driver import dense_sum, exchange, make_pipeline, send
from table import BACKENDS, COMPRESSORS, Backend, Row, gradients

from horovod_sparse.compressors.micro import MiCRO
from horovod_sparse.compressors.momentum import Clip, MomentumCorrection
from horovod_sparse.compressors.noop import NoOp
from horovod_sparse.compressors.threshold import Threshold
from horovod_sparse.compressors.topk import TopK

on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_masking_ratio_one_is_momentum_sgd_and_with_masking_plain_sgd(nesterov: bool) -> None:
    backend, rng = BACKENDS[0], np.random.default_rng(1)
    momentum = make_pipeline(backend, NoOp(momentum=MomentumCorrection(0.8, nesterov, masking=False)), {"p": (300,)})
    plain = make_pipeline(backend, NoOp(momentum=MomentumCorrection(0.8, False, masking=True)), {"p": (300,)})
    buffer = np.zeros(300)
    for _ in range(5):
        gradient = gradients("gaussian", 300, rng)
        buffer = 0.8 * buffer + gradient
        expected = gradient + 0.8 * buffer if nesterov else buffer
        np.testing.assert_allclose(send(backend, momentum, gradient).values, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(send(backend, plain, gradient).values, gradient)


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
@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_the_reduced_gradient_has_the_norm_that_was_asked_for(backend: Backend, averages: bool, scope: str) -> None:
    """Of independent gradients, whether workers are averaged or summed; of every parameter or of all together."""
    world, shapes = 4, {"a": (4000,), "b": (3000,)}
    rng = np.random.default_rng(11)
    compressor = NoOp(clip=Clip(1.0, scope), granularity="layer")
    pipelines = [
        make_pipeline(backend, compressor, shapes, world=world, position=rank, averages=averages)
        for rank in range(world)
    ]
    for pipeline in pipelines:
        given = {name: 10 * rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        arrays = {name: backend.array(gradient) for name, gradient in given.items()}
        pipeline.start_step(arrays.values())
        for name, array in arrays.items():
            pipeline.arrive(name, array)
    norms = {}
    for buckets in zip(*(pipeline.buckets for pipeline in pipelines), strict=True):
        name = buckets[0].name
        reduced = exchange(backend, pipelines, buckets, divisor=float(world) if averages else 1.0)[0][name]
        norms[name] = float(np.linalg.norm(dense_sum(reduced, *shapes[name])))
    if scope == "layer":
        assert norms == {name: pytest.approx(1.0, rel=0.1) for name in shapes}
    else:
        assert math.hypot(*norms.values()) == pytest.approx(1.0, rel=0.1)


@on_every_backend
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_entries_that_are_not_finite_do_not_hinder_clipping(backend: Backend, bad: float, scope: str) -> None:
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
@pytest.mark.parametrize("row", [row for row in COMPRESSORS if not row.momentum], ids=str)
def test_thresholds_and_controllers_follow_the_learning_rate(backend: Backend, row: Row) -> None:
    """In units of the update nothing happens when the rate changes: the same entries are sent, whatever the rates were.

    Powers of two, so that the units differ by no rounding.
    """
    size, steps, change = 2000, 60, 30
    pipelines = [make_pipeline(backend, row.make(0.02, lr_in_residual=True), {"p": (size,)}) for _ in range(2)]
    rng = np.random.default_rng(12)
    for step in range(steps):
        gradient = gradients("laplace", size, rng)
        sent = []
        for pipeline, rate in zip(pipelines, (1.0, 1.0 if step < change else 0.125), strict=True):
            pipeline.start_step()
            bucket = pipeline.arrive("p", backend.array(gradient / np.float32(rate)), rate)
            assert bucket is not None
            parts = exchange(backend, [pipeline], [bucket])[0]["p"]
            pipeline.end_step()
            assert parts is not None
            sent.append((parts[0][0], parts[0][1] * np.float32(rate)))
        (indices, values), (expected, expected_values) = sent
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_array_equal(values, expected_values)


@on_every_backend
def test_micro_stays_at_its_count_when_the_rate_drops(backend: Backend) -> None:
    """After the rate has come down to a tenth the residual counts for ten times as much as a gradient."""
    compressor = MiCRO(0.01, lr_in_residual=True, warmup=None)
    world, size, k = 2, 20_000, 200
    pipelines = [
        make_pipeline(backend, compressor, {"p": (size,)}, world=world, position=rank) for rank in range(world)
    ]
    rng, counts = np.random.default_rng(13), []
    for step in range(160):
        for pipeline in pipelines:
            pipeline.arrive("p", backend.array(gradients("laplace", size, rng)), 0.1 if step < 100 else 0.01)
        parts = exchange(backend, pipelines, [pipeline.buckets[0] for pipeline in pipelines])[0]["p"]
        for pipeline in pipelines:
            pipeline.end_step()
        assert parts is not None
        counts.append(parts[0][0].size)
    assert min(counts[100:]) >= k / 10 and max(counts[100:]) <= 1.75 * k, counts[100:]


@on_every_backend
def test_a_controller_goes_on_where_rates_change_differently(backend: Backend) -> None:
    """Also where the parameters of two ranks arrive in different orders: the threshold is the same on both."""
    world, rng = 2, np.random.default_rng(14)
    pipelines = [
        make_pipeline(
            backend,
            MiCRO(0.05, lr_in_residual=True, warmup=None),
            {"p": (1000,), "q": (1000,)},
            world=world,
            position=rank,
        )
        for rank in range(world)
    ]
    buckets = [pipeline.buckets[0] for pipeline in pipelines]
    for step, rates in enumerate(((0.1, 0.2), (0.1, 0.2), (0.01, 0.02), (0.01, 0.02), (0.01, 0.01), (0.01, 0.01))):
        by_name = dict(zip(("p", "q"), rates, strict=True))
        for pipeline, names in zip(pipelines, ("pq", "qp"), strict=True):
            for name in names:
                pipeline.arrive(name, backend.array(gradients("laplace", 1000, rng)), by_name[name])
        exchange(backend, pipelines, buckets)
        for pipeline, bucket in zip(pipelines, buckets, strict=True):
            # A rank that knows no threshold selects its share, and proposes what would have selected it.
            assert (bucket.state.threshold == 0.0) == (step == 0), step
            pipeline.end_step()
            assert bucket.state.step == pipeline.stats().steps
            assert not math.isnan(pipeline.stats().mean.total.threshold)
        assert buckets[0].state.state_dict() == buckets[1].state.state_dict()


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
    settings = {"momentum": MomentumCorrection(0.9, masking=False), "lr_in_residual": True, "warmup": None}
    velocities = []
    for rate in (0.5, 0.0):
        pipeline = make_pipeline(backend, TopK(0.1, **settings), {"p": (300,)})
        for gradient, learning_rate in zip(given, (0.5, rate), strict=True):
            pipeline.arrive("p", gradient, learning_rate)
            exchange(backend, [pipeline], [pipeline.buckets[0]])
            pipeline.end_step()
        velocities.append(pipeline.state_dict()["velocities"]["p"])
    np.testing.assert_array_equal(*velocities)
