"""The laws that every compressor obeys on every backend."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from table import BACKENDS, COMPRESSORS, DEGENERATE, KINDS, Backend, Row, gradients

from horovod_sparse.buckets import Parameter, plan
from horovod_sparse.pipeline import Bucket, Pipeline

pytestmark = [
    pytest.mark.parametrize("backend", BACKENDS, ids=str),
    pytest.mark.parametrize("row", COMPRESSORS, ids=str),
]

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


def one_bucket(backend: Backend, row: Row, size: int, ratio: float, **options: Any) -> tuple[Pipeline, Bucket]:
    compressor = row.make(ratio, **options)
    pipeline = Pipeline(backend.ops, compressor, world=1, position=0, rank=0)
    dtype = options.get("residual_dtype") or "float32"
    layouts = plan([Parameter("p", (size,), dtype, "cpu")], compressor)
    pipeline.add_buckets(layouts, lambda name: backend.array(np.zeros(1, np.float32)))
    return pipeline, pipeline.buckets[0]


def send(backend: Backend, pipeline: Pipeline, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One step of one worker: the indices and values that it sends."""
    bucket = pipeline.arrive("p", backend.array(gradient))
    assert bucket is not None
    indices, values = backend.ops.unpack(pipeline.message(bucket))
    return backend.numpy(indices), backend.numpy(values)


def check_step(row: Row, pipeline: Pipeline, before: np.ndarray, after: np.ndarray, sent: tuple[Any, Any]) -> None:
    """What holds after each step, whatever the input: `before` is gradient + old residual."""
    indices, values = sent
    compressor = pipeline.compressor
    assert indices.dtype == np.int64 and values.dtype == np.float32
    assert (np.diff(indices) > 0).all(), "indices must be unique and ascending"
    assert indices.size <= compressor.room(before.size)
    assert indices.size >= min(1, np.count_nonzero(before)), "something must be sent unless all is zero"
    restored = after.copy()
    restored[indices] += values
    np.testing.assert_array_equal(restored, before, strict=True, err_msg="sent + kept must be gradient + old residual")
    if before.dtype == np.float32:
        np.testing.assert_array_equal(after[indices], 0.0)
        np.testing.assert_array_equal(values, before[indices])
    unsent = np.delete(np.abs(before), indices)
    if indices.size and unsent.size:
        assert np.abs(before[indices]).min() >= unsent.max(), "the largest magnitudes are sent"


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_sent_plus_kept_is_gradient_plus_residual(backend: Backend, row: Row, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 300))
    ratio = data.draw(st.sampled_from((1.0, 0.5, 0.1, 0.01)))
    dtype = data.draw(st.sampled_from(("float32", "float64")))
    steps = data.draw(st.lists(npst.arrays(np.float32, size, elements=FINITE), min_size=1, max_size=3))
    pipeline, bucket = one_bucket(backend, row, size, ratio, residual_dtype=dtype)
    for gradient in steps:
        before = backend.numpy(bucket.buffer).copy() + gradient
        sent = send(backend, pipeline, gradient)
        check_step(row, pipeline, before, backend.numpy(bucket.buffer), sent)


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_gradients_neither_crash_nor_starve(backend: Backend, row: Row, name: str) -> None:
    gradient = DEGENERATE[name]
    for ratio in (1.0, 0.3, 0.01):
        pipeline, bucket = one_bucket(backend, row, gradient.size, ratio)
        for step in range(12):
            scaled = gradient if step == 0 else gradient * np.float32(0.01)
            before = backend.numpy(bucket.buffer).copy() + scaled
            sent = send(backend, pipeline, scaled)
            check_step(row, pipeline, before, backend.numpy(bucket.buffer), sent)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_gradients_never_reach_the_residual(backend: Backend, row: Row, bad: float) -> None:
    gradient = gradients("laplace", 400, np.random.default_rng(0))
    poisoned = gradient.copy()
    poisoned[17] = bad
    pipeline, bucket = one_bucket(backend, row, 400, 0.1)
    send(backend, pipeline, gradient)
    before = backend.numpy(bucket.buffer).copy()
    with pytest.raises(FloatingPointError, match=r"rank 0: .*parameter 'p' holds NaN or infinity"):
        pipeline.arrive("p", backend.array(poisoned))
    np.testing.assert_array_equal(backend.numpy(bucket.buffer), before)

    pipeline, bucket = one_bucket(backend, row, 400, 0.1, not_finite="propagate")
    send(backend, pipeline, gradient)
    before = backend.numpy(bucket.buffer).copy()
    assert pipeline.arrive("p", backend.array(poisoned)) is bucket
    message = pipeline.message(bucket)
    assert backend.ops.is_not_finite(message)
    written: list[object] = []
    pipeline.reduce(bucket, message, 1.0, lambda slot, parts: written.append(parts))
    assert written == [None]
    np.testing.assert_array_equal(backend.numpy(bucket.buffer), before)
    assert np.isfinite(send(backend, pipeline, gradient)[1]).all()


def test_what_was_sent_returns_when_another_rank_is_not_finite(backend: Backend, row: Row) -> None:
    gradient = gradients("laplace", 400, np.random.default_rng(0))
    pipeline, bucket = one_bucket(backend, row, 400, 0.1, not_finite="propagate")
    pipeline.world, pipeline.position = 2, 1
    pipeline.arrive("p", backend.array(gradient))
    mine = backend.numpy(pipeline.message(bucket))
    theirs = backend.numpy(backend.ops.pack_not_finite(bucket.buffer, pipeline.compressor.room(400)))
    pipeline.reduce(bucket, backend.array(np.concatenate((theirs, mine))), 2.0, lambda slot, parts: None)
    np.testing.assert_array_equal(backend.numpy(bucket.buffer), gradient)


def test_without_residual_nothing_is_kept(backend: Backend, row: Row) -> None:
    rng = np.random.default_rng(1)
    pipeline, bucket = one_bucket(backend, row, 1000, 0.1, residual=False)
    for _ in range(3):
        gradient = gradients("laplace", 1000, rng)
        indices, values = send(backend, pipeline, gradient)
        np.testing.assert_array_equal(values, gradient[indices])
        assert not backend.numpy(bucket.buffer).any()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_callers_gradient_is_untouched(backend: Backend, row: Row, dtype: type) -> None:
    gradient = backend.array(gradients("laplace", 600, np.random.default_rng(2)).astype(dtype).reshape(20, 30).T)
    copy_of_it = backend.numpy(gradient).copy()
    compressor = row.make(0.1)
    pipeline = Pipeline(backend.ops, compressor, world=1, position=0, rank=0)
    pipeline.add_buckets(plan([Parameter("p", (30, 20), "float32", "cpu")], compressor), lambda name: gradient)
    bucket = pipeline.arrive("p", gradient)
    assert bucket is not None
    pipeline.message(bucket)
    np.testing.assert_array_equal(backend.numpy(gradient), copy_of_it, strict=True)


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
def test_selection_does_not_depend_on_scale_or_sign(backend: Backend, row: Row, scale: float) -> None:
    rng = np.random.default_rng(3)
    for kind in KINDS:
        gradient = gradients(kind, 3000, rng)
        for ratio in row.ratios:
            plain = send(backend, one_bucket(backend, row, 3000, ratio)[0], gradient)[0]
            scaled = send(backend, one_bucket(backend, row, 3000, ratio)[0], gradient * np.float32(-scale))[0]
            np.testing.assert_array_equal(plain, scaled)


def test_selection_follows_a_permutation(backend: Backend, row: Row) -> None:
    rng = np.random.default_rng(4)
    gradient = gradients("laplace", 3000, rng)
    order = rng.permutation(3000)
    for ratio in row.ratios:
        plain = send(backend, one_bucket(backend, row, 3000, ratio)[0], gradient)[0]
        permuted = send(backend, one_bucket(backend, row, 3000, ratio)[0], gradient[order])[0]
        np.testing.assert_array_equal(np.sort(order[permuted]), plain)


def test_contraction(backend: Backend, row: Row) -> None:
    """||u - C(u)||^2 <= (1 - count/d) ||u||^2 for every selection of the largest magnitudes."""
    rng = np.random.default_rng(5)
    for kind in KINDS:
        gradient = gradients(kind, 3000, rng)
        for ratio in row.ratios:
            pipeline, bucket = one_bucket(backend, row, 3000, ratio)
            indices, _ = send(backend, pipeline, gradient)
            kept = np.square(backend.numpy(bucket.buffer), dtype=np.float64).sum()
            assert kept <= (1 - indices.size / 3000) * np.square(gradient, dtype=np.float64).sum() * (1 + 1e-12)


def test_same_input_same_choice(backend: Backend, row: Row) -> None:
    rng = np.random.default_rng(6)
    steps = [gradients("laplace", 2000, rng) for _ in range(8)]
    runs = []
    for _ in range(2):
        pipeline, _ = one_bucket(backend, row, 2000, row.ratios[0])
        runs.append([send(backend, pipeline, gradient) for gradient in steps])
    for (indices, values), (again_indices, again_values) in zip(*runs, strict=True):
        np.testing.assert_array_equal(indices, again_indices)
        np.testing.assert_array_equal(values, again_values)


@pytest.mark.parametrize("saved_after", [0, 1, 7, 13])
def test_a_saved_state_continues_identically(backend: Backend, row: Row, saved_after: int) -> None:
    rng = np.random.default_rng(7)
    steps = [gradients("pareto", 2000, rng) for _ in range(26)]
    original, _ = one_bucket(backend, row, 2000, 0.01)
    for gradient in steps[:saved_after]:
        send(backend, original, gradient)
    saved = copy.deepcopy(original.state_dict())
    json.dumps(saved["adaptive"])  # Plain values only.
    resumed, _ = one_bucket(backend, row, 2000, 0.01)
    resumed.load_state_dict(saved)
    for gradient in steps[saved_after:]:
        expected, got = send(backend, original, gradient), send(backend, resumed, gradient)
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_array_equal(got[1], expected[1])


def test_achieved_count_with_error_feedback(backend: Backend, row: Row) -> None:
    rng = np.random.default_rng(8)
    size = 20_000
    for ratio in row.ratios:
        pipeline, _ = one_bucket(backend, row, size, ratio)
        counts = [send(backend, pipeline, gradients("laplace", size, rng))[0].size for _ in range(60)]
        achieved = np.mean(counts[20:]) / pipeline.compressor.asked(size)
        assert row.band[0] <= achieved <= row.band[1], f"ratio {ratio}: achieved/asked is {achieved:.3f}"


def test_ratio_one_sends_everything(backend: Backend, row: Row) -> None:
    gradient = gradients("mostly-zero", 5000, np.random.default_rng(9))
    pipeline, bucket = one_bucket(backend, row, 5000, 1.0)
    indices, values = send(backend, pipeline, gradient)
    everything = np.zeros_like(gradient)
    everything[indices] = values
    np.testing.assert_array_equal(everything, gradient)
    assert not backend.numpy(bucket.buffer).any()


def test_backends_select_the_same_entries(backend: Backend, row: Row) -> None:
    oracle = BACKENDS[0]
    for kind in KINDS:
        for ratio in row.ratios:
            rng = np.random.default_rng(10)
            pipelines = [one_bucket(side, row, 5000, ratio)[0] for side in (oracle, backend)]
            for _ in range(15):
                gradient = gradients(kind, 5000, rng)
                expected, got = (send(side, p, gradient) for side, p in zip((oracle, backend), pipelines, strict=True))
                np.testing.assert_array_equal(got[0], expected[0])
                np.testing.assert_array_equal(got[1], expected[1])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_reduced_gradient_is_the_sum_of_what_was_sent(backend: Backend, row: Row, world: int) -> None:
    """Unequal, overlapping and empty selections; the parameters of two buckets."""
    rng = np.random.default_rng(11)
    shapes = {"a": (40, 30), "b": (17,), "c": (900,), "d": (1,)}
    compressor = row.make(row.ratios[0], granularity="bucket", bucket_bytes=4096)
    layouts = plan([Parameter(name, shape, "float32", "cpu") for name, shape in shapes.items()], compressor)
    assert len(layouts) == 2
    pipelines = [Pipeline(backend.ops, compressor, world=world, position=r, rank=r) for r in range(world)]
    sent = {name: np.zeros(shape, np.float64) for name, shape in shapes.items()}
    gathered: dict[str, list[np.ndarray]] = {layout.name: [] for layout in layouts}
    for rank, pipeline in enumerate(pipelines):
        pipeline.add_buckets(layouts, lambda name: backend.array(np.zeros(1, np.float32)))
        for name, shape in shapes.items():
            gradient = gradients("laplace", int(np.prod(shape)), rng).reshape(shape) * (rank != 1)
            sent[name] += gradient
            bucket = pipeline.arrive(name, backend.array(gradient) if rank != 3 or name != "c" else None)
            if rank == 3 and name == "c":
                sent[name] -= gradient
            if bucket is not None:
                gathered[bucket.name].append(backend.numpy(pipeline.message(bucket)))
        for name, kept in pipeline.state_dict()["residuals"].items():
            sent[name] -= backend.numpy(kept)
    reduced = {}

    def write(slot: Any, parts: Any) -> None:
        flat = backend.array(np.zeros(slot.numel, np.float32))
        for entries in parts:
            backend.ops.scatter_add(flat, entries.indices, entries.values)
        reduced[slot.name] = backend.numpy(flat).reshape(slot.shape)

    for bucket in pipelines[0].buckets:
        pipelines[0].reduce(bucket, backend.array(np.concatenate(gathered[bucket.name])), float(world), write)
    for name in shapes:
        np.testing.assert_allclose(reduced[name], sent[name] / world, rtol=1e-6, atol=1e-7)
