"""TensorFlow's two paths in steps that are not the usual ones: clipped, overflowing, given up, with frozen parameters."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from table import gradients

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow", reason="Horovod was built without TensorFlow", exc_type=ImportError)

from test_tensorflow_graph import Worker, other_messages, pair, same_step  # noqa: E402

from horovod_sparse.compressors.momentum import MomentumCorrection  # noqa: E402
from horovod_sparse.exchange.wire import PADDING  # noqa: E402
from horovod_sparse.tensorflow.compressors import SIDCo, TopK  # noqa: E402

SHAPES = {"a": (40, 10), "b": (300,), "c": (20,)}


def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: gradients("laplace", int(np.prod(shape)), rng).reshape(shape) for name, shape in SHAPES.items()}


def nothing(worker: Worker) -> list[np.ndarray]:
    """Another worker's messages with no entries."""
    messages = [np.zeros((bucket.capacity, 2), np.int32) for bucket in worker.engine.buckets]
    for message in messages:
        message[:, 0] = PADDING
    return messages


# --- clipping ---


@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_finite_entries_are_clipped_by_their_norm(scope: str, dtype: str, bad: float | None) -> None:
    rng = np.random.default_rng(0)
    graph, host = pair(
        TopK,
        SHAPES,
        world=2,
        clip_norm=0.5,
        clip_scope=scope,
        exclude=["c"],
        not_finite="propagate",
        granularity="layer",
    )
    given = {name: gradient.astype(dtype) for name, gradient in draw(rng).items()}
    if dtype == "float64":
        # The squares of these leave the range of float64, and they that of the residual.
        given["b"][7] = 1e200
    if bad is not None:
        given["a"][3, 4] = bad
    same_step(graph, host, given, other_messages(graph, rng))
    if bad is not None and dtype != "float64":
        kept = graph.state()["residuals"]
        finite = {n: np.where(np.isfinite(g), g, 0).astype(np.float64) for n, g in given.items()}
        norms = {name: np.linalg.norm(gradient) for name, gradient in finite.items()}
        for name in ("a", "b"):
            norm = norms[name] if scope == "layer" else np.linalg.norm(list(norms.values()))
            assert norm > 0.5 * np.sqrt(2)
            expected = finite[name] * (0.5 * np.sqrt(2) / norm)
            np.testing.assert_allclose(kept[name], expected, rtol=1e-6, atol=1e-30)


def test_a_gradient_below_the_limit_is_left_as_it_is() -> None:
    rng = np.random.default_rng(1)
    clipped, _ = pair(TopK, SHAPES, clip_norm=1e6, clip_scope="model", exclude=["c"])
    plain, _ = pair(TopK, SHAPES, exclude=["c"])
    for _ in range(3):
        given = draw(rng)
        mine, expected = clipped.step(given)[0], plain.step(given)[0]
        for name in SHAPES:
            np.testing.assert_array_equal(mine[name], expected[name])


# --- overflow ---


@pytest.mark.parametrize("correction", [None, MomentumCorrection(0.9), MomentumCorrection(0.9, nesterov=True)])
def test_a_residual_that_overflows_stays_finite_and_fails_the_step(correction: MomentumCorrection | None) -> None:
    graph, host = pair(TopK, {"p": (300,), "q": (200,)}, 0.01, world=2, momentum_correction=correction)
    raised = []
    for step in range(3):
        huge = np.linspace(0.5, 0.6, 300).astype(np.float32) * np.finfo(np.float32).max
        given = {"p": huge, "q": np.full(200, 1.0 + step, np.float32)}
        for worker in (graph, host):
            try:
                worker.step(given, nothing(graph))
            except tf.errors.OpError as error:
                raised.append((step, worker, str(error)))
        for part in ("residuals", "velocities"):
            for name, array in graph.state()[part].items():
                assert np.isfinite(array).all()
                np.testing.assert_array_equal(array, host.state()[part][name])
    # Nesterov's form adds 1.9 times the first gradient.
    first = 0 if correction is not None and correction.nesterov else 1
    assert [(step, worker) for step, worker, _ in raised] == [(s, w) for s in range(first, 3) for w in (graph, host)]
    for _, _, message in raised:
        assert "holds NaN or infinity, or overflows its residual" in message and "p" in message


# --- steps that are given up ---


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("engine", ["graph", "host"])
@pytest.mark.parametrize("make", [TopK, functools.partial(SIDCo, stages=3)], ids=["topk", "sidco"])
def test_a_step_that_is_given_up_loses_nothing_and_says_nothing_twice(make: Any, engine: str, number: int) -> None:
    """Another worker's message for one of two buckets is too short, so that the step ends there."""
    rng = np.random.default_rng(2)
    worker = pair(make, SHAPES, world=2, granularity="layer", exclude=["c"])[engine == "host"]
    silent = [
        np.copy(message) for message in nothing(pair(make, SHAPES, world=2, granularity="layer", exclude=["c"])[0])
    ]
    for _ in range(3):
        worker.step(draw(rng), silent)
    before, lost, given = worker.state(), draw(rng), draw(rng)
    short = [message[:-1] if index == number else message for index, message in enumerate(silent)]
    with pytest.raises(tf.errors.OpError):
        worker.step(lost, short)
    assert worker.engine.stats().steps == 3
    reduced, _ = worker.step(given, silent)
    after = worker.state()
    for name in ("a", "b"):
        # The other worker has sent nothing, and the mean is of both.
        total = 2 * reduced[name] + after["residuals"][name]
        kept = before["residuals"][name]
        assert any((total == start + given[name]).all() for start in (kept, kept + lost[name]))
    assert worker.engine.stats().steps == 4
    assert all(adaptive["step"] == 4 for adaptive in after["adaptive"].values())
    assert not getattr(worker.engine, "_reduced", {})


# --- frozen parameters ---


@pytest.mark.parametrize("granularity", ["layer", "model"])
@pytest.mark.parametrize("correction", [None, MomentumCorrection(0.9)])
def test_what_waits_for_a_frozen_parameter_is_dropped(granularity: str, correction: Any) -> None:
    rng = np.random.default_rng(3)
    graph, host = pair(TopK, SHAPES, world=2, granularity=granularity, exclude=["c"], momentum_correction=correction)
    for _ in range(3):
        same_step(graph, host, draw(rng), other_messages(graph, rng))
    given = draw(rng)
    del given["b"]
    assert graph.state()["residuals"]["b"].any()
    for _ in range(2):
        reduced = same_step(graph, host, given, nothing(graph), frozenset({"b"}))
        assert not reduced["b"].any()
        for part in ("residuals", "velocities"):
            assert not graph.state()[part].get("b", np.zeros(1)).any()
        assert graph.state()["residuals"]["a"].any()
    same_step(graph, host, draw(rng), other_messages(graph, rng))


# --- many small parameters ---


def test_small_parameters_share_a_message() -> None:
    rng = np.random.default_rng(4)
    shapes = {f"small{number}": (7, 3) for number in range(30)} | {"large": (400_000,), "last": (5,)}
    for worker in pair(TopK, shapes, exclude=["*"], momentum_correction=MomentumCorrection(0.5)):
        for _ in range(2):
            given = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
            before = worker.state()["velocities"]
            reduced, _ = worker.step(given)
            for name, gradient in given.items():
                np.testing.assert_array_equal(reduced[name], np.float32(0.5) * before[name] + 2 * gradient)
        assert worker.collectives.dense_names == ["dense.0", "dense.1", "dense.2"]
