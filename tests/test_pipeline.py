"""Residual manager and pipeline: state, statistics, and what they refuse."""

from __future__ import annotations

import math
import warnings
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from driver import make_pipeline, make_pipelines, send, take_step
from table import BACKENDS, COMPRESSORS, ORACLE, Backend, Row, gradients, gradients_of

from horovod_sparse.compressors import DGC, SIDCo, Threshold, TopK
from horovod_sparse.compressors.base import BUCKET_BYTES
from horovod_sparse.core.layout import Slot
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.core.store import log_start
from horovod_sparse.exchange.protocols import Entries, Reduced
from horovod_sparse.torch.compressors import TopK as TorchTopK
from horovod_sparse.torch.group_reducer import GroupReducer
from horovod_sparse.torch.ops import TorchOps

on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)
SHAPES = {"weight": (30, 40), "kernel": (500,), "head": (7, 11)}


def pipeline_of(backend: Backend, compressor: Any) -> Pipeline:
    return make_pipeline(backend, compressor, SHAPES)


def step(backend: Backend, pipeline: Pipeline, seed: int) -> None:
    take_step(backend, [pipeline], [gradients_of(SHAPES, np.random.default_rng(seed))])


def _changed(state: Any, part: str, **changed: Any) -> Any:
    return {**state, part: {**state[part], **changed}}


def _without(state: Any, part: str, name: str) -> Any:
    return {**state, part: {one: value for one, value in state[part].items() if one != name}}


def _residual(value: Any, dtype: Any = np.float32) -> Any:
    return lambda state: _changed(state, "residuals", head=np.full((7, 11), value, dtype))


def _adaptive(name: str, value: Any) -> Any:
    return lambda state: _changed(state, "adaptive", head={**state["adaptive"]["head"], name: value})


DAMAGES: dict[str, tuple[Any, str]] = {
    "not a dict": (lambda state: None, "must"),
    "another version": (lambda state: {**state, "version": 1}, "state must have version 3, got 1"),
    "a part is None": (lambda state: {**state, "velocities": None}, "must"),
    "a part is missing": (lambda state: {p: value for p, value in state.items() if p != "learning_rates"}, "must"),
    "a residual is missing": (lambda state: _without(state, "residuals", "head"), r"one of them lacks \['head'\]"),
    "a residual more": (lambda state: _changed(state, "residuals", more=np.zeros(3)), r"one of them lacks \['more'\]"),
    "another shape": (
        lambda state: _changed(state, "residuals", head=np.zeros(77, np.float32)),
        r"of another shape \(got, expected\): {'head': \(\(77,\), \(7, 11\)\)}",
    ),
    "a velocity more": (
        lambda state: _changed(state, "velocities", head=np.zeros((7, 11), np.float32)),
        r"velocities must be .*; missing: \[\], unexpected: \['head'\].* and the same momentum",
    ),
    "NaN": (_residual(np.nan), "must"),
    "infinity": (_residual(np.inf), "must"),
    "complex": (_residual(1j, np.complex64), "must"),
    "boolean": (_residual(True, np.bool_), "must"),
    "integers": (_residual(1, np.int64), "must"),
    "text": (lambda state: _changed(state, "residuals", head="text"), "must"),
    "a rate of NaN": (lambda state: {**state, "learning_rates": {"head": math.nan}}, "must"),
    "a rate of nothing": (lambda state: {**state, "learning_rates": {"else": 0.1}}, "must"),
    "a rate that is true": (lambda state: {**state, "learning_rates": {"head": True}}, "must"),
    "lengths that are negative": (lambda state: {**state, "updates": [1.0, -1.0]}, "must be two finite numbers"),
    "lengths of NaN": (lambda state: {**state, "updates": [math.nan, 1.0]}, "must be two finite numbers"),
    "three lengths": (lambda state: {**state, "updates": [1.0, 1.0, 1.0]}, "must be two finite numbers"),
    "lengths that are none": (lambda state: {**state, "updates": "long"}, "must be two finite numbers"),
    "sparse": (lambda state: {**state, "sparse": [1]}, "must"),
    "no adaptive state": (
        lambda state: _without(state, "adaptive", "head"),
        r"state\['adaptive'\] must name the same parameters",
    ),
    "another algorithm": (
        lambda state: _changed(state, "adaptive", head={}),
        "adaptive state must be like .*another algorithm",
    ),
    **{
        f"{name}={value!r}": (_adaptive(name, value), "must")
        for name, values in {
            "step": (-1, 1.5, True, None, 10**30),
            "aim": (math.nan, math.inf, -1.0, 0.0, 1e9, 1, None, "1"),
            "cut": (math.nan, -1.0, 0.0, 1, None),
            "stages": (0, -3, 10**9, 2.0, True, None),
            "windows_seen": (-1, 0.5, None),
            "window": (None, [math.nan], [-1.0], [1.0] * 5, ["x"], [None], 3.0),
            "errors": (
                None,
                [[1, 2]],
                [[2, 0.1, 1], [2, 0.2, 1]],
                [[0, 0.1, 1]],
                [[10**9, 0.1, 1]],
                [[1, math.nan, 1]],
                [[1, 0.1, -1]],
                [3],
            ),
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("backend", [one for one in BACKENDS if one.name in ("numpy", "torch")], ids=str)
@pytest.mark.parametrize(("damage", "expected"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_is_refused_and_changes_nothing(backend: Backend, damage: Any, expected: str) -> None:
    pipeline = pipeline_of(backend, SIDCo(0.1, warmup=None))
    for seed in range(7):
        step(backend, pipeline, seed)
    before = pipeline.state_dict()
    with pytest.raises(ValueError, match=expected):
        pipeline.load_state_dict(damage(pipeline.state_dict()))
    after = pipeline.state_dict()
    assert after["adaptive"] == before["adaptive"]
    for parameter, residual in before["residuals"].items():
        np.testing.assert_array_equal(backend.numpy(after["residuals"][parameter]), backend.numpy(residual))


@pytest.mark.parametrize("row", COMPRESSORS, ids=str)
def test_damaged_numbers_of_every_algorithm_are_refused(row: Row) -> None:
    pipeline = make_pipeline(ORACLE, row.make(0.1), {"p": (300,)})
    rng = np.random.default_rng(0)
    for _ in range(3):
        send(ORACLE, pipeline, gradients("laplace", 300, rng))
    state = pipeline.state_dict()
    for name, value in state["adaptive"]["p"].items():
        for damaged in (math.nan, -math.inf, None, "text", [None]) if not isinstance(value, list) else (None, [None]):
            with pytest.raises(ValueError, match="adaptive state must"):
                pipeline.load_state_dict({**state, "adaptive": {"p": {**state["adaptive"]["p"], name: damaged}}})
    pipeline.load_state_dict(state)


@pytest.mark.parametrize(("slack", "first"), [(60.0, 100), (1.0, 5)], ids=["some have no room", "most have no room"])
def test_truncation_that_lasts_is_said_once(slack: float, first: int) -> None:
    pipeline = make_pipeline(ORACLE, Threshold(0.1, ratio=0.01, slack=slack), {"p": (1000,)})
    rng = np.random.default_rng(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # These steps are forgotten with the other statistics.
        for _ in range(2):
            pipeline.reset()
            for _ in range(first - 1):
                send(ORACLE, pipeline, gradients("laplace", 1000, rng))
        assert not caught
        for _ in range(50):
            send(ORACLE, pipeline, gradients("laplace", 1000, rng))
    assert len(caught) == 1
    said = str(caught[0].message)
    assert f"for {first} steps more entries of bucket 'p' qualified than its message has room for" in said
    assert f"room for {10 * slack:g})" in said and "or, with Threshold, the threshold" in said


@on_every_backend
def test_what_a_parameter_has_kept_is_dropped(backend: Backend) -> None:
    for compressor in (SIDCo(0.1, warmup=None), DGC(0.1, warmup=None)):
        pipeline = pipeline_of(backend, compressor)
        for seed in (2, 3, 0):
            step(backend, pipeline, seed)
        before = pipeline.state_dict()
        pipeline.drop("kernel")
        after = pipeline.state_dict()
        for part in ("residuals", "velocities"):
            for name, array in before[part].items():
                expected = np.zeros(500) if name == "kernel" else backend.numpy(array)
                np.testing.assert_array_equal(backend.numpy(after[part][name]), expected)
        # What was seen of it makes no difference either: a worker that loads what is left goes on in the same way.
        loaded = pipeline_of(backend, compressor)
        loaded.load_state_dict(after)
        for one in (pipeline, loaded):
            step(backend, one, 1)
        for name, array in pipeline.state_dict()["residuals"].items():
            np.testing.assert_array_equal(backend.numpy(array), backend.numpy(loaded.state_dict()["residuals"][name]))


@on_every_backend
def test_a_state_that_is_loaded_ends_what_had_begun(backend: Backend) -> None:
    pipeline = pipeline_of(backend, TopK(0.1, warmup=None))
    state = pipeline.state_dict()
    for seed, use in enumerate((lambda: pipeline.load_state_dict(state), pipeline.reset, pipeline.start_step)):
        pipeline.arrive("kernel", backend.array(np.ones(500, np.float32)))
        use()
        step(backend, pipeline, seed)


@on_every_backend
def test_memory_is_one_residual(backend: Backend) -> None:
    elements = sum(math.prod(shape) for shape in SHAPES.values())
    for granularity in ("layer", BUCKET_BYTES, "model"):
        pipeline = pipeline_of(backend, TopK(0.1, granularity=granularity, warmup=None))
        assert sum(bucket.buffer.nbytes for bucket in pipeline.buckets) == 4 * elements


@on_every_backend
def test_statistics_are_true(backend: Backend) -> None:
    """Of each bucket: what it has sent is in `test_machine`, and how many bytes in `test_plan`."""
    pipeline = pipeline_of(backend, TopK(0.1, granularity="layer", slack=1.5, warmup=None))
    for seed in range(4):
        step(backend, pipeline, seed)
    stats = pipeline.stats()
    assert stats.steps == 4
    residual = np.concatenate([backend.numpy(r).reshape(-1) for r in pipeline.state_dict()["residuals"].values()])
    for snapshot in (stats.last, stats.mean):
        for one in snapshot.buckets:
            size = math.prod(SHAPES[one.name])
            assert (one.numel, one.target, one.ratio) == (size, size // 10, one.count / size) and one.count > 0
        for field in ("numel", "target", "count", "truncated", "bytes_sent"):
            assert getattr(snapshot.total, field) == sum(getattr(one, field) for one in snapshot.buckets)
        assert snapshot.total.residual_norm == pytest.approx(np.linalg.norm(residual), rel=1e-6)
    # What is printed: buckets and total with entries, target, sent, ratio, truncated, bytes.
    lines = [line.replace(",", "").split() for line in str(stats).splitlines()]
    assert lines[0][:4] == ["mean", "of", "4", "steps"]
    assert lines[1][:5] == ["bucket", "entries", "target", "sent", "ratio"]
    printed = {name: [float(number) for number in numbers] for name, *numbers in lines[2:-1]}
    for one in (*stats.mean.buckets, stats.mean.total):
        entries, target, sent, ratio, truncated, sent_bytes = printed.pop(one.name)
        assert ratio == pytest.approx(one.ratio, rel=0.005)
        known = [one.numel, one.target, one.count, one.truncated, one.bytes_sent]
        np.testing.assert_allclose([entries, target, sent, truncated, sent_bytes], known, atol=0.5, rtol=0)
    assert not printed


@on_every_backend
def test_overflow_is_counted_and_stays_in_the_residual(backend: Backend) -> None:
    """A one-stage fit of a light tail overestimates; the room ends at k."""
    compressor = SIDCo(0.01, stages=1, distribution="gpareto", slack=1.0, warmup=None)
    pipeline = make_pipeline(backend, compressor, {"p": (100_000,)})
    bucket = pipeline.buckets[0]
    gradient = gradients("gaussian", 100_000, np.random.default_rng(0))
    sent = send(backend, pipeline, gradient).indices
    total = pipeline.stats().last.total
    assert total.count == sent.size == 1000 and total.truncated > 100
    above = np.count_nonzero(np.abs(gradient) > np.float32(total.threshold))
    assert total.truncated == above - 1000
    assert np.count_nonzero(np.abs(backend.numpy(bucket.buffer)) > np.float32(total.threshold)) == total.truncated


@on_every_backend
def test_a_gradient_arrives_once_per_step(backend: Backend) -> None:
    """Whatever its bucket has reached, until the step has ended."""
    pipeline = pipeline_of(backend, TopK(0.1, granularity="layer", warmup=None))

    def arrives_twice() -> None:
        with pytest.raises(RuntimeError, match="'head' arrived twice"):
            pipeline.arrive("head", None)

    for _ in range(2):
        bucket = pipeline.arrive("head", None)
        assert bucket is not None
        arrives_twice()
        message = bucket.begin().message
        arrives_twice()
        pipeline.advance(bucket, message, 1.0, lambda slots, reduced: None)
        arrives_twice()
        pipeline.end_step()


@on_every_backend
def test_the_first_gradient_that_is_not_finite_is_named(backend: Backend) -> None:
    pipeline = make_pipeline(backend, TopK(0.1, granularity="layer", warmup=None), {"p": (300,), "q": (300,)})
    # The bucket of the last parameter is exchanged first.
    with pytest.raises(FloatingPointError, match="the gradient of parameter 'q' holds NaN"):
        take_step(backend, [pipeline], [dict.fromkeys("pq", np.full(300, np.nan, np.float32))])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_that_the_type_of_gradients_cannot_hold_are_named(dtype: torch.dtype) -> None:
    """With PyTorch; what then becomes of the step is in `test_numpy_allreduce`. bfloat16 has the range of float32."""
    slots = [Slot("p", 0, 20, (20,)), Slot("q", 20, 20, (4, 5))]
    gradients = [torch.zeros(slot.shape, dtype=dtype) for slot in slots]
    sums = Entries(None, torch.tensor([1.0, 1e6]).repeat_interleave(20))
    reducer = GroupReducer(TorchTopK(0.1), Mock(world=2), {})
    reducer._routes.in_buckets = dict(zip("pq", gradients, strict=True))
    reducer._step.gradients = {one: one for one in gradients}
    overflowed = reducer._write(slots, Reduced(TorchOps(), sums, 1.0, {}))
    assert overflowed == (["q"] if dtype == torch.float16 else [])


@on_every_backend
def test_a_dense_step_compares_the_step_alone(backend: Backend) -> None:
    """Workers that have been in sparse steps begin a dense one if more join them: each has a state of its own."""
    pipelines = make_pipelines(backend, SIDCo(0.1, warmup=2.0), {"p": (1000,)}, workers=3)
    given, buckets = 3 * [{"p": np.ones(1000, np.float32)}], [pipeline.buckets[0] for pipeline in pipelines]
    for rank, bucket in enumerate(buckets):
        bucket.state.cut = 1.0 + rank
    take_step(backend, pipelines, given)
    assert all(bucket.is_dense for bucket in buckets)
    buckets[1].state.step += 1
    with pytest.raises(RuntimeError, match="rank 0: the ranks disagree on the state of bucket 'p'"):
        take_step(backend, pipelines, given)


@pytest.mark.parametrize(
    ("settings", "world", "times"),
    [
        ({}, 1, None),
        ({}, 9, None),
        ({}, 11, "1.1"),
        ({"warmup": 1.0}, 32, "3.2"),
    ],
)
def test_an_exchange_that_sends_more_than_dense_is_warned_of(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], world: int, times: str | None
) -> None:
    compressor = TopK(0.1, **{"warmup": None, **settings})
    log_start(make_pipeline(ORACLE, compressor, {"p": (100, 100)}, world=world), "none")
    told = [f"{compressor!r} with {world} workers sends {times} times as many bytes as a dense allreduce of float32"]
    assert [text.partition(";")[0] for text in caplog.messages] == (told if times else [])
