"""Dense in half precision: sent + kept stays exact, nothing overflows, and a step that fails leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from driver import collective, dense_sum, exchange, make_pipeline
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from receivers import Halves
from table import BACKENDS, ORACLE, WITH_OPERATIONS, Backend

from horovod_sparse.compressors.momentum import MomentumCorrection
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.exchange import wire

Array = np.ndarray
NUMEL = 300
LARGEST = {np.float32: 3.4e38, np.float64: 1.7e308}

worlds = st.integers(1, wire.MOST_HALF_WORKERS)


def pipelines_of(backend: Backend, world: int, **settings: Any) -> list[Pipeline]:
    compressor = Halves(0.1, min_numel=0, granularity="model", **settings)
    dtype = settings.get("residual_dtype") or "float32"
    shapes = {"p": (NUMEL,)}
    return [make_pipeline(backend, compressor, shapes, world=world, position=p, dtype=dtype) for p in range(world)]


def arrive(backend: Backend, pipelines: Sequence[Pipeline], gradients: Sequence[Array]) -> None:
    for pipeline, gradient in zip(pipelines, gradients, strict=True):
        pipeline.start_step()
        pipeline.arrive("p", backend.array(gradient.copy()))


def step(backend: Backend, pipelines: Sequence[Pipeline], gradients: Sequence[Array]) -> list[Array] | None:
    """One step of all ranks; every rank's reduced gradient, not divided."""
    arrive(backend, pipelines, gradients)
    results = exchange(backend, pipelines, [pipeline.buckets[0] for pipeline in pipelines])
    for pipeline in pipelines:
        pipeline.end_step()
    return None if results[0]["p"] is None else [dense_sum(one["p"], NUMEL) for one in results]


def residual(backend: Backend, pipeline: Pipeline) -> Array:
    return backend.numpy(pipeline.buckets[0].buffer).copy()


def half_of(value: float, limit: float) -> float:
    """The nearest number of 11 significant bits, at least 2^-24 apart, among those up to the limit."""
    clipped = float(np.float32(min(max(value, -limit), limit)))
    spacing = max(2.0 ** (np.frexp(clipped)[1] - 11), 2.0**-24)
    return float(np.round(clipped / spacing)) * spacing


@given(world=worlds, data=st.data())
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
def test_what_is_taken_and_what_is_left_are_the_value(
    backend: Backend, dtype: Any, world: int, data: st.DataObject
) -> None:
    """Exactly, with no rounding: `math.fsum` of both is the value."""
    limit = wire.half_limit(world)
    near = [
        limit,
        np.nextafter(dtype(limit), dtype(np.inf)),
        65504.0,
        limit * 2.0**23,
        limit * 2.0**24,
        limit * 2.0**53,
    ]
    some = st.one_of(
        st.floats(-1e-4, 1e-4), st.floats(-LARGEST[dtype], LARGEST[dtype]), st.sampled_from([*near, -limit, -65520.0])
    )
    values = data.draw(st.lists(some, min_size=1, max_size=20))
    x = np.array(values).astype(dtype)
    buffer = backend.array(x)
    taken, left = backend.numpy(backend.ops.take_half(buffer, limit)), backend.numpy(buffer)
    assert taken.dtype == np.float16 and left.dtype == dtype
    assert np.abs(taken.astype(np.float64)).max() * world <= 65504
    for value, sent, kept in zip(x.tolist(), taken.tolist(), left.tolist(), strict=True):
        difference = value - sent
        # Both are exact: the difference has no more bits than the value.
        assert kept == difference and sent == value - kept
        coarse = abs(value) >= limit * 2.0 ** np.finfo(dtype).nmant * 2.0
        assert sent == (0.0 if coarse else half_of(value, limit))


@given(
    numbers=npst.arrays(np.uint32, 64),
    wide=npst.arrays(np.uint64, 64),
    world=worlds,
)
@pytest.mark.parametrize("backend", [one for one in WITH_OPERATIONS if one is not ORACLE], ids=str)
def test_all_backends_take_the_same_bits(backend: Backend, numbers: Array, wide: Array, world: int) -> None:
    for bits, dtype in ((numbers, np.float32), (wide, np.float64)):
        values = bits.view(dtype)
        x = values[np.isfinite(values)]
        if not x.size:
            continue
        mine, theirs = x.copy(), backend.array(x)
        expected, got = (
            ORACLE.ops.take_half(mine, wire.half_limit(world)),
            backend.ops.take_half(theirs, wire.half_limit(world)),
        )
        assert backend.numpy(got).tobytes() == expected.tobytes()
        assert backend.numpy(theirs).tobytes() == mine.tobytes()


def test_the_limit_is_the_largest_power_of_two_that_never_overflows() -> None:
    for world in range(1, wire.MOST_HALF_WORKERS + 1):
        limit = wire.half_limit(world)
        assert np.log2(limit) % 1 == 0 and limit * world <= 65504 < 2 * limit * world
        # The flags of so many workers add up exactly.
        assert np.float16(world - 1) + np.float16(1) == world


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_sent_and_kept_are_what_came(backend: Backend, dtype: str) -> None:
    """Of gradients whose sums are exact in float16. Half of them are beyond the limit, and leave in later steps."""
    world, rng = 3, np.random.default_rng(0)
    pipelines = pipelines_of(backend, world, residual_dtype=dtype)
    total = np.zeros(NUMEL)
    for number in range(8):
        gradients = [
            rng.integers(-3, 4, NUMEL).astype(np.float32) * (2.0**14 if number < 2 else 0.0) for _ in range(world)
        ]
        total += np.sum(gradients, axis=0, dtype=np.float64)
        results = step(backend, pipelines, gradients)
        assert results is not None and all(result.tobytes() == results[0].tobytes() for result in results)
        total -= results[0]
        left = np.sum([residual(backend, pipeline) for pipeline in pipelines], axis=0, dtype=np.float64)
        np.testing.assert_array_equal(left, total)
    assert not total.any(), "everything has left"


def test_the_rounding_error_is_sent_later() -> None:
    """A constant gradient below the spacing of float16 would never change anything without the residual."""
    pipelines = pipelines_of(ORACLE, 2)
    gradients = [np.full(NUMEL, 2.0**-26, np.float32) for _ in range(2)]
    sums = np.zeros(NUMEL)
    for _ in range(16):
        results = step(ORACLE, pipelines, gradients)
        assert results is not None
        sums += results[0]
    np.testing.assert_array_equal(sums, np.full(NUMEL, 2 * 16 * 2.0**-26))


@pytest.mark.parametrize("residual_is_kept", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_step_that_fails_returns_everything(backend: Backend, dtype: str, residual_is_kept: bool) -> None:
    rng = np.random.default_rng(1)
    pipelines = pipelines_of(backend, 2, residual_dtype=dtype, not_finite="propagate", residual=residual_is_kept)
    step(backend, pipelines, [rng.laplace(size=NUMEL).astype(np.float32) for _ in range(2)])
    before = [residual(backend, pipeline) for pipeline in pipelines]
    gradients = [(rng.laplace(size=NUMEL) * 1e5).astype(np.float32) for _ in range(2)]
    gradients[0][5] = np.nan
    assert step(backend, pipelines, gradients) is None
    for pipeline, old, gradient in zip(pipelines, before, gradients, strict=True):
        expected = old + np.nan_to_num(gradient) if residual_is_kept else np.zeros(NUMEL)
        np.testing.assert_array_equal(residual(backend, pipeline), expected)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_step_that_is_given_up_returns_everything(backend: Backend) -> None:
    rng = np.random.default_rng(2)
    for discardable in (False, True):
        pipelines = pipelines_of(backend, 2, discardable=discardable)
        step(backend, pipelines, [rng.laplace(size=NUMEL).astype(np.float32) for _ in range(2)])
        before = [residual(backend, pipeline) for pipeline in pipelines]
        gradients = [rng.laplace(size=NUMEL).astype(np.float32) for _ in range(2)]
        arrive(backend, pipelines, gradients)
        for pipeline, old, gradient in zip(pipelines, before, gradients, strict=True):
            message = backend.numpy(pipeline.begin(pipeline.buckets[0]).message)
            # The adapter reduces in place.
            if message.flags.writeable:
                message[:] = -7
            pipeline.abort()
            np.testing.assert_array_equal(residual(backend, pipeline), old if discardable else old + gradient)


def test_momentum_is_not_masked_where_everything_is_sent() -> None:
    """As in the dense steps: a velocity that were zero after each step would be no momentum."""
    pipelines = pipelines_of(ORACLE, 1, momentum_correction=MomentumCorrection(0.5))
    for expected in (1.0, 1.5, 1.75):
        results = step(ORACLE, pipelines, [np.ones(NUMEL, np.float32)])
        assert results is not None
        np.testing.assert_array_equal(results[0], expected)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_the_bytes_of_the_message(backend: Backend) -> None:
    """Two ranks in step 5: the values, a flag, and the 16 lowest bits of the step."""
    pipelines = pipelines_of(backend, 2)
    gradient = np.zeros(NUMEL, np.float32)
    gradient[[0, 2, 299]] = 1.0, -(2.0**-24), 1e6
    for pipeline in pipelines:
        pipeline.buckets[0].state.step = 5
    gradients = [gradient, gradient.copy()]
    gradients[1][7] = np.inf
    arrive(backend, pipelines, gradients)
    asked = [pipeline.begin(pipeline.buckets[0]) for pipeline in pipelines]
    assert [one.kind for one in asked] == ["allreduce"] * 2
    for number, one in enumerate(asked):
        expected = np.zeros(NUMEL + 17, np.uint16)
        # 1, the smallest denormal, and the largest power of two that two ranks may send: 2^14.
        expected[[0, 2, 299]] = 0x3C00, 0x8001, 0x7400
        expected[NUMEL] = 0x3C00 * number
        expected[[NUMEL + 1, NUMEL + 3]] = 0x3C00
        message = backend.numpy(one.message)
        assert message.dtype == np.float16 and message.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("at", "number", "text"),
    [
        (NUMEL, 3.0, "3.0 of 2 workers say that their gradients are not finite"),
        (NUMEL, np.nan, "the sum of the messages for bucket 'p' is damaged"),
        (NUMEL + 4, 1.0, "the ranks disagree on the state of bucket 'p'"),
    ],
)
@pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
def test_a_damaged_sum_is_an_error(backend: Backend, at: int, number: float, text: str) -> None:
    pipelines = pipelines_of(backend, 2)
    arrive(backend, pipelines, [np.ones(NUMEL, np.float32)] * 2)
    answers = collective(backend, [pipeline.begin(pipeline.buckets[0]) for pipeline in pipelines])
    for pipeline, answer in zip(pipelines, answers, strict=True):
        answer[at] = number
        with pytest.raises(RuntimeError, match=text):
            pipeline.buckets[0].advance(answer)


def test_ranks_in_different_steps_raise() -> None:
    pipelines = pipelines_of(ORACLE, 2)
    pipelines[1].buckets[0].state.step = 1
    arrive(ORACLE, pipelines, [np.ones(NUMEL, np.float32)] * 2)
    answers = collective(ORACLE, [pipeline.begin(pipeline.buckets[0]) for pipeline in pipelines])
    for pipeline, answer in zip(pipelines, answers, strict=True):
        with pytest.raises(RuntimeError, match="the ranks disagree"):
            pipeline.buckets[0].advance(answer)
