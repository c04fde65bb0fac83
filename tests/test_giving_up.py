"""A step that is given up, or fails: nothing is lost, nothing is counted, and the next step is not disturbed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import collective, exchange, make_pipeline
from table import BACKENDS, COMPRESSORS, Backend, Row, gradients

from horovod_sparse.compressors.topk import TopK
from horovod_sparse.core.pipeline import Pipeline

pytestmark = pytest.mark.parametrize("backend", BACKENDS, ids=str)

SHAPES = {"weight": (30, 40), "kernel": (500,), "head": (77,)}
WORLD = 2
NAMES = ("topk", "topk-union", "sidco-gpareto-robust", "dgc", "dgc-nesterov", "randomk", "micro")
ROWS = [row for row in COMPRESSORS if row.name in NAMES]


def make(backend: Backend, row: Row, **settings: Any) -> list[Pipeline]:
    compressor = row.make(0.1, granularity="layer", **settings)
    return [make_pipeline(backend, compressor, SHAPES, world=WORLD, position=rank) for rank in range(WORLD)]


def given(rng: np.random.Generator) -> list[dict[str, np.ndarray]]:
    """Every rank's gradients of a step."""
    return [
        {name: gradients("laplace", int(np.prod(shape)), rng).reshape(shape) for name, shape in SHAPES.items()}
        for _ in range(WORLD)
    ]


def reduce(
    backend: Backend, pipelines: list[Pipeline], step: list[dict[str, np.ndarray]], *, undoes: bool = False
) -> list[Any]:
    """A whole step; what every rank got of it."""
    for pipeline, mine in zip(pipelines, step, strict=True):
        pipeline.start_step(undoes=undoes)
        for name, gradient in mine.items():
            pipeline.arrive(name, backend.array(gradient))
    results = [
        exchange(backend, pipelines, buckets) for buckets in zip(*(one.buckets for one in pipelines), strict=True)
    ]
    for pipeline in pipelines:
        pipeline.end_step()
    return results


def residuals(backend: Backend, pipeline: Pipeline) -> dict[str, np.ndarray]:
    return {name: backend.numpy(array).copy() for name, array in pipeline.residuals.state_dict().items()}


def begin_and_stop(
    backend: Backend,
    pipelines: list[Pipeline],
    step: list[dict[str, np.ndarray]],
    reached: int,
    *,
    undoes: bool = False,
) -> None:
    """A step that an exception ends: 0, after a gradient; 1, in the first exchange; 2, in the second; 3, before the end."""
    for pipeline, mine in zip(pipelines, step, strict=True):
        pipeline.start_step(undoes=undoes)
        for name in list(SHAPES)[: 1 if reached == 0 else None]:
            pipeline.arrive(name, backend.array(mine[name]))
    if reached == 0:
        return
    together = list(zip(*(one.buckets for one in pipelines), strict=True))
    for buckets in together[: reached - 1] if reached < 3 else together:
        exchange(backend, pipelines, buckets)
    if reached < 3:
        collective(backend, [bucket.begin() for bucket in together[reached - 1]])


@pytest.mark.parametrize("reached", range(4))
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_what_was_taken_returns_when_a_step_is_given_up(backend: Backend, row: Row, reached: int) -> None:
    rng = np.random.default_rng(0)
    pipelines = make(backend, row)
    for _ in range(3):
        reduce(backend, pipelines, given(rng))
    before = [residuals(backend, pipeline) for pipeline in pipelines]
    states = [pipeline.state_dict()["adaptive"] for pipeline in pipelines]
    step = given(rng)
    begin_and_stop(backend, pipelines, step, reached)
    for pipeline, mine, kept, adaptive in zip(pipelines, step, before, states, strict=True):
        pipeline.abort()
        assert pipeline.stats().steps == 3
        assert pipeline.state_dict()["adaptive"] == adaptive
        arrived = list(SHAPES)[: 1 if reached == 0 else None]
        for name, residual in residuals(backend, pipeline).items():
            if not row.momentum:
                expected = kept[name] + mine[name] if name in arrived else kept[name]
                np.testing.assert_array_equal(residual, expected)
    reduced = reduce(backend, pipelines, given(rng))
    assert len(reduced) == len(SHAPES)
    assert [pipeline.stats().steps for pipeline in pipelines] == [4] * WORLD


@pytest.mark.parametrize("reached", range(5))
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_undone_step_leaves_no_trace(backend: Backend, row: Row, reached: int) -> None:
    """Whether it was given up somewhere (0 to 3) or fails at its end (4): training goes on as if it had never been."""
    rng = np.random.default_rng(1)
    steps = [given(rng) for _ in range(6)]
    pipelines, undisturbed = (make(backend, row, not_finite="propagate") for _ in range(2))
    for number, step in enumerate(steps):
        if number == 3:
            spike = [{name: 50 * gradient for name, gradient in mine.items()} for mine in given(rng)]
            if reached < 4:
                begin_and_stop(backend, pipelines, spike, reached, undoes=True)
            else:
                spike[0]["kernel"][7] = np.nan
                reduce(backend, pipelines, spike, undoes=True)
            for pipeline in pipelines:
                pipeline.abort()
        results, expected = reduce(backend, pipelines, step), reduce(backend, undisturbed, step)
        for of_bucket, of_expected in zip(results, expected, strict=True):
            for mine, theirs in zip(of_bucket, of_expected, strict=True):
                for name in mine:
                    for got, wanted in zip(mine[name], theirs[name], strict=True):
                        np.testing.assert_array_equal(got[0], wanted[0])
                        np.testing.assert_array_equal(got[1], wanted[1])
    for pipeline, other in zip(pipelines, undisturbed, strict=True):
        assert pipeline.state_dict()["adaptive"] == other.state_dict()["adaptive"]
        mine, theirs = pipeline.stats(), other.stats()
        assert (mine.steps, mine.mean.total.count) == (theirs.steps, theirs.mean.total.count)
        for part in ("residuals", "velocities"):
            arrays, expected = pipeline.state_dict()[part], other.state_dict()[part]
            for name in expected:
                np.testing.assert_array_equal(backend.numpy(arrays[name]), backend.numpy(expected[name]))


def test_a_state_that_is_loaded_ends_what_had_begun(backend: Backend) -> None:
    rng = np.random.default_rng(4)
    pipeline = make_pipeline(backend, TopK(0.1, warmup=None), {"p": (300,), "q": (300,)})
    state = pipeline.state_dict()
    for use in (lambda: pipeline.load_state_dict(state), pipeline.reset, pipeline.start_step):
        pipeline.arrive("p", backend.array(gradients("laplace", 300, rng)))
        use()
        for name in ("p", "q"):
            bucket = pipeline.arrive(name, backend.array(gradients("laplace", 300, rng)))
        assert bucket is not None
        exchange(backend, [pipeline], [bucket])
        pipeline.end_step()


@pytest.mark.parametrize("row", [row for row in ROWS if row.largest], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_residual_that_overflows_stays_finite_and_fails_the_step(backend: Backend, row: Row, dtype: str) -> None:
    largest = float(np.finfo(dtype).max)
    pipelines = [
        make_pipeline(backend, row.make(0.01), {"p": (300,)}, world=2, position=rank, dtype=dtype) for rank in range(2)
    ]
    raised = []
    for step in range(4):
        huge = np.linspace(0.5, 0.6, 300).astype(dtype) * largest
        for rank, pipeline in enumerate(pipelines):
            pipeline.start_step()
            pipeline.arrive("p", backend.array(huge if rank == 0 else np.ones(300, dtype)))
        results = exchange(backend, pipelines, [pipeline.buckets[0] for pipeline in pipelines])
        for pipeline in pipelines:
            try:
                pipeline.end_step()
            except FloatingPointError as error:
                raised.append((step, str(error)))
        assert np.isfinite(backend.numpy(pipelines[0].buckets[0].buffer)).all()
        if pipelines[0].buckets[0].velocity is not None:
            assert np.isfinite(backend.numpy(pipelines[0].buckets[0].velocity)).all()
        assert (results[0]["p"] is None) == (results[1]["p"] is None)
    assert raised, "the residual of rank 0 must have overflowed"
    steps = {step for step, _ in raised}
    assert len(raised) == 2 * len(steps), "every rank raises in the same steps"
    assert "rank 0: the gradient of parameter 'p' holds NaN or infinity, or overflows its residual" in raised[0][1]
