"""The balanced exchange: nothing is lost, all ranks get the same, and the regions follow the entries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from driver import collective, dense_sum, make_pipelines, take_step
from hypothesis import given
from hypothesis import strategies as st
from table import BACKENDS, ORACLE, WITH_OPERATIONS, Backend

from horovod_sparse import compressors
from horovod_sparse.compressors.momentum import MomentumCorrection
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.exchange import regions, wire
from horovod_sparse.exchange.balanced import Balanced
from horovod_sparse.exchange.hierarchical import Hierarchical
from horovod_sparse.exchange.protocols import Exchange

NUMEL = 97
SHAPES = {"a": (7, 5), "b": (62,)}
SETTINGS: dict[str, Any] = {"min_numel": 0, "granularity": "model", "exchange": Balanced()}

worlds = st.integers(1, 5)
loads = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def pipelines_of(backend: Backend, workers: int | str, compressor: Any, **settings: Any) -> list[Pipeline]:
    return make_pipelines(backend, compressor, SHAPES, workers, **settings)


def of_parameters(gradient: np.ndarray) -> dict[str, np.ndarray]:
    return {"b": gradient[35:].copy(), "a": gradient[:35].reshape(7, 5).copy()}


def arrive(backend: Backend, pipelines: Sequence[Pipeline], gradients: Sequence[np.ndarray]) -> None:
    for pipeline, gradient in zip(pipelines, gradients, strict=True):
        for name, part in of_parameters(gradient).items():
            pipeline.arrive(name, backend.array(part))


def flat(backend: Backend, pipeline: Pipeline) -> np.ndarray:
    """The residual as NumPy has it: the last parameter is the first in the bucket."""
    return backend.numpy(pipeline.buckets[0].buffer).copy()


def step(backend: Backend, pipelines: Sequence[Pipeline], gradients: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """One step of all ranks; every rank's reduced gradient, not divided, in the order of the bucket."""
    results = take_step(backend, pipelines, list(map(of_parameters, gradients)))
    if results[0]["a"] is None:
        return None
    return [np.concatenate([dense_sum(one["b"], 62), dense_sum(one["a"], 35)]) for one in results]


def dyadic(rng: np.random.Generator, count: int, spread: float = 1.0) -> list[np.ndarray]:
    """Gradients whose sums are exact in float32, in any order."""
    return [(np.round(rng.laplace(size=NUMEL) * 64 * spread) / 64).astype(np.float32) for _ in range(count)]


def in_order(gradient: np.ndarray) -> np.ndarray:
    """A gradient in the order of the bucket: its last parameter comes first."""
    return np.concatenate([gradient[35:], gradient[:35]])


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """The places of the largest magnitudes, ascending; among equals the lowest ones."""
    return np.sort(np.argsort(-np.abs(values), kind="stable")[:count])


def reference(residuals: Sequence[np.ndarray], k: int, bounds: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The exchange with TopK in dense arrays: what is reduced, and what every rank keeps."""
    world, kept = len(residuals), [residual.copy() for residual in residuals]
    received = np.zeros(NUMEL, np.float32)
    for rank, residual in enumerate(kept):
        others = residual.copy()
        others[bounds[rank] : bounds[rank + 1]] = 0
        chosen = largest(others, k - k // world)
        for first, after in itertools.pairwise(bounds):
            here = chosen[(chosen >= first) & (chosen < after)]
            sent = here[largest(others[here], regions.room(k, world))]
            received[sent] += others[sent]
            residual[sent] -= others[sent]
    reduced = np.zeros(NUMEL, np.float32)
    for rank, residual in enumerate(kept):
        region = np.arange(bounds[rank], bounds[rank + 1])
        residual[region] += received[region]
        places = region[largest(residual[region], regions.forwarded(k, world))]
        reduced[places] = residual[places]
        residual[places] = 0
    return reduced, kept


def check_step(
    backend: Backend,
    pipelines: Sequence[Pipeline],
    rng: np.random.Generator,
    expected: Callable[[list[np.ndarray]], tuple[np.ndarray, list[np.ndarray]]],
) -> None:
    """A step must do what `expected` says of the residuals before the selection: what is reduced, and what each keeps."""
    gradients = dyadic(rng, len(pipelines))
    before = [flat(backend, one) + in_order(gradient) for one, gradient in zip(pipelines, gradients, strict=True)]
    reduced, kept = expected(before)
    results = step(backend, pipelines, gradients)
    assert results is not None
    for result, pipeline, mine in zip(results, pipelines, kept, strict=True):
        np.testing.assert_array_equal(result, reduced)
        np.testing.assert_array_equal(flat(backend, pipeline), mine)


@given(world=worlds, seed=st.integers(0, 999), ratio=st.sampled_from([0.02, 0.1, 0.3, 1.0]))
@pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
def test_every_step_is_as_in_dense_arrays(backend: Backend, world: int, seed: int, ratio: float) -> None:
    pipelines = pipelines_of(backend, world, compressors.TopK(ratio, warmup=None, **SETTINGS))
    rng, k = np.random.default_rng(seed), max(1, int(ratio * NUMEL))
    bounds = regions.uniform(NUMEL, world)
    for _ in range(4):
        check_step(backend, pipelines, rng, partial(reference, k=k, bounds=bounds))
        bounds = pipelines[0].buckets[0].state.bounds
        assert all(pipeline.buckets[0].state.bounds == bounds for pipeline in pipelines)


PAIRS = {
    "TopK": lambda **s: compressors.TopK(0.1, warmup=None, **s),
    "SIDCo": lambda **s: compressors.SIDCo(0.1, warmup=None, **s),
    "GaussianK": lambda **s: compressors.GaussianK(0.1, warmup=None, **s),
    "DGC": lambda **s: compressors.DGC(0.1, momentum=0.0, warmup=None, **s),
    "RedSync": lambda **s: compressors.RedSync(0.1, warmup=None, **s),
    "Threshold": lambda **s: compressors.Threshold(2.0, ratio=0.1, **s),
    "RandomK": lambda **s: compressors.RandomK(0.1, warmup=None, **s),
}


OWNED: dict[str, tuple[Exchange, int | str]] = {"balanced": (Balanced(), 4), "hierarchical": (Hierarchical(), "aabb")}
"""Exchanges in which workers own entries, and their workers."""


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("way", "name"), [*itertools.product(OWNED, PAIRS), ("hierarchical", "RandomBlock")])
def test_sent_and_kept_are_what_came(way: str, name: str, dtype: str) -> None:
    """For every compressor that sends pairs. A step whose gradient is not finite changes nothing but its finite entries."""
    (exchange, workers), rng = OWNED[way], np.random.default_rng(3)
    make = PAIRS.get(name, lambda **settings: compressors.RandomBlock(0.1, warmup=None, **settings))
    settings = {**SETTINGS, "exchange": exchange, "not_finite": "propagate", "residual": dtype}
    pipelines = pipelines_of(ORACLE, workers, make(**settings), dtype=dtype)
    total = np.zeros(NUMEL)
    for number in range(6):
        gradients = dyadic(rng, len(pipelines))
        if number == 3:
            gradients[2][40] = np.nan
        total += np.sum([in_order(np.nan_to_num(gradient)) for gradient in gradients], axis=0, dtype=np.float64)
        before = [flat(ORACLE, one) + in_order(np.nan_to_num(g)) for one, g in zip(pipelines, gradients, strict=True)]
        results = step(ORACLE, pipelines, gradients)
        assert (results is None) == (number == 3)
        if results is None:
            for pipeline, old in zip(pipelines, before, strict=True):
                np.testing.assert_array_equal(flat(ORACLE, pipeline), old)
        else:
            assert all(result.tobytes() == results[0].tobytes() for result in results)
            total -= results[0]
        residual = np.sum([flat(ORACLE, pipeline) for pipeline in pipelines], axis=0, dtype=np.float64)
        np.testing.assert_array_equal(residual, total)


@pytest.mark.parametrize("masking", [True, False])
def test_momentum_is_masked_where_a_worker_has_sent_or_forwarded(masking: bool) -> None:
    correction = MomentumCorrection(0.5, masking=masking)
    pipelines = pipelines_of(ORACLE, 2, compressors.TopK(0.1, momentum=correction, warmup=None, **SETTINGS))
    gradients = [gradient + np.float32(10) for gradient in dyadic(np.random.default_rng(5), 2)]
    results = step(ORACLE, pipelines, gradients)
    assert results is not None
    # In the order of the bucket: rank 0 owns the first 48 entries. k = 9, so each forwards 5 and sends 5 to the other.
    reduced = np.concatenate([results[0][:62], results[0][62:]])
    for rank, pipeline in enumerate(pipelines):
        mine = np.arange(NUMEL) < 48 if rank == 0 else np.arange(NUMEL) >= 48
        forwarded = mine & (reduced != 0)
        sent = ~mine & (flat(ORACLE, pipeline) == 0)
        assert forwarded.sum() == sent.sum() == 5
        np.testing.assert_array_equal(pipeline.buckets[0].velocity == 0, (forwarded | sent) & masking)


@pytest.mark.parametrize(("exchange", "workers"), OWNED.values(), ids=OWNED)
def test_training_goes_on_from_a_saved_state(exchange: Exchange, workers: int | str) -> None:
    """With the state of the first pipelines, the others compute the same bits."""
    rng, settings = np.random.default_rng(2), {**SETTINGS, "exchange": exchange}
    main, twin = (pipelines_of(ORACLE, workers, compressors.SIDCo(0.2, warmup=None, **settings)) for _ in range(2))
    for number in range(8):
        gradients = [one * np.linspace(4, 0.1, NUMEL, dtype=np.float32) for one in dyadic(rng, len(main))]
        mine = step(ORACLE, main, gradients)
        if number < 5:
            for one, other in zip(main, twin, strict=True):
                other.load_state_dict(one.state_dict())
            continue
        theirs = step(ORACLE, twin, gradients)
        assert mine is not None and theirs is not None and mine[0].tobytes() == theirs[0].tobytes()
        for one, other in zip(main, twin, strict=True):
            assert flat(ORACLE, one).tobytes() == flat(ORACLE, other).tobytes()


def test_bounds_are_a_part_of_the_state_and_begin_anew_with_other_workers() -> None:
    rng, compressor = np.random.default_rng(2), compressors.SIDCo(0.2, warmup=None, **SETTINGS)
    main, fewer, afresh = (pipelines_of(ORACLE, world, compressor) for world in (3, 2, 2))
    for _ in range(5):
        step(ORACLE, main, [gradient * np.linspace(4, 0.1, NUMEL, dtype=np.float32) for gradient in dyadic(rng, 3)])
    assert main[0].buckets[0].state.bounds != regions.uniform(NUMEL, 3)
    for pipelines, keeps in ((fewer, True), (afresh, False)):
        for one, other in zip(main, pipelines, strict=False):
            state = one.state_dict()
            for adaptive in () if keeps else state["adaptive"].values():
                adaptive.pop("bounds")
            other.load_state_dict(state)
    gradients = dyadic(rng, 2)
    for mine, theirs in zip(*(step(ORACLE, pipelines, gradients) or () for pipelines in (fewer, afresh)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert fewer[0].buckets[0].state.bounds == afresh[0].buckets[0].state.bounds


# --- messages ---


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_the_bytes_of_both_messages(backend: Backend) -> None:
    """Two ranks; the bucket has 97 entries, of which the first 48 belong to rank 0. Indices count from there, or from 48."""
    pipelines = pipelines_of(backend, 2, compressors.TopK(0.03, slack=2.0, warmup=None, **SETTINGS))
    gradients = [np.zeros(NUMEL, np.float32) for _ in range(2)]
    # In the bucket, parameter "b" comes first: its entry 0 is number 35 of the gradient.
    gradients[0][[35 + 1, 35 + 47, 35 + 50]] = 1.0, -2.0, 0.5
    gradients[1][[35 + 47, 35 + 61]] = 4.0, 8.0
    arrive(backend, pipelines, gradients)
    buckets = [one.buckets[0] for one in pipelines]
    first = [bucket.begin() for bucket in buckets]
    assert [one.kind for one in first] == ["alltoall"] * 2
    # k = 2, of which one is selected from the other's region. There is room for 3 entries for each region.
    empty = [-1, 0]
    rows = [
        [empty, empty, empty, [2, 0x3F000000], empty, empty],
        [[47, 0x40800000], empty, empty, empty, empty, empty],
    ]
    for one, expected in zip(first, rows, strict=True):
        got = backend.numpy(one.message)
        assert got.dtype == np.int32 and got.shape == (6, 2)
        assert got.tobytes() == np.array(expected, np.int64).astype(np.uint32).tobytes()
    answers = collective(backend, first)
    second = [bucket.advance(answer) for bucket, answer in zip(buckets, answers, strict=True)]
    assert [one.kind for one in second] == ["allgather"] * 2
    checksum = regions.checksum([0, 48, 97])
    # One entry of each region is forwarded: 4 - 2 at 47, and 8 at 61. Each rank has received one entry.
    for one, expected in zip(
        second, ([[47, 0x40000000], [checksum, 1]], [[61, 0x41000000], [checksum, 1]]), strict=True
    ):
        assert backend.numpy(one.message).tobytes() == np.array(expected, np.int64).astype(np.uint32).tobytes()


FLAWS: dict[str, tuple[int, int, str]] = {
    "index beyond the region": (0, 48, "the message to worker 0 for bucket 'b' is damaged: its indices do not ascend"),
    "index beyond the bucket": (0, 97, "the message to worker 0"),
    "negative index": (0, -2, "the message to worker 0"),
    "descending": (0, 47, "the message to worker 0"),
}


@pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
@pytest.mark.parametrize("flaw", FLAWS)
def test_a_damaged_part_is_an_error_on_all_ranks(backend: Backend, flaw: str) -> None:
    """Only its receiver sees it, and tells the others."""
    row, index, text = FLAWS[flaw]
    pipelines = pipelines_of(backend, 2, compressors.TopK(0.1, warmup=None, **SETTINGS))
    arrive(backend, pipelines, dyadic(np.random.default_rng(4), 2))
    buckets = [one.buckets[0] for one in pipelines]
    answers = collective(backend, [bucket.begin() for bucket in buckets])
    # A worker sends nothing to itself here: the first half of what worker 0 has received is empty.
    answers[0][len(answers[0]) // 2 + row, 0] = index
    answers = collective(backend, [bucket.advance(one) for bucket, one in zip(buckets, answers, strict=True)])
    for bucket, answer in zip(buckets, answers, strict=True):
        with pytest.raises(RuntimeError, match=text):
            bucket.advance(answer)


def test_ranks_at_different_steps_of_a_schedule_all_raise() -> None:
    """What rank 1 receives has the length that it expects, by chance. Nobody may raise before all have gathered."""
    made = [compressors.TopK(ratio, warmup=None, **SETTINGS) for ratio in (0.1, 0.2, 0.3)]
    pipelines = [pipelines_of(ORACLE, 3, compressor)[rank] for rank, compressor in enumerate(made)]
    arrive(ORACLE, pipelines, dyadic(np.random.default_rng(4), 3))
    buckets = [one.buckets[0] for one in pipelines]
    parts = [np.split(bucket.begin().message, 3) for bucket in buckets]
    received = [np.concatenate(mine) for mine in zip(*parts, strict=True)]
    assert len(received[1]) == 3 * len(parts[1][0])
    gathered = np.concatenate([bucket.advance(one).message for bucket, one in zip(buckets, received, strict=True)])
    for bucket in buckets:
        with pytest.raises(RuntimeError, match=r"the ranks disagree|is damaged"):
            bucket.advance(gathered)


@pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
def test_a_sum_that_overflows_stays_at_the_largest_number(backend: Backend) -> None:
    pipelines = pipelines_of(backend, 2, compressors.TopK(0.1, not_finite="propagate", warmup=None, **SETTINGS))
    most = np.finfo(np.float32).max
    results = step(backend, pipelines, [np.full(NUMEL, 3e38, np.float32) for _ in range(2)])
    assert results is not None and results[0].max() == most
    assert step(backend, pipelines, dyadic(np.random.default_rng(0), 2)) is not None
    assert all(np.isfinite(flat(backend, pipeline)).all() for pipeline in pipelines)


def test_a_value_that_is_not_a_number_is_not_kept() -> None:
    pipelines = pipelines_of(ORACLE, 2, compressors.TopK(0.1, not_finite="propagate", warmup=None, **SETTINGS))
    gradients = dyadic(np.random.default_rng(4), 2)
    arrive(ORACLE, pipelines, gradients)
    buckets = [one.buckets[0] for one in pipelines]
    answers = collective(ORACLE, [bucket.begin() for bucket in buckets])
    assert answers[0][-1, 0] == wire.PADDING and answers[0].reshape(2, -1, 2)[1, 0, 0] >= 0
    answers[0].reshape(2, -1, 2)[1, 0, 1] = np.float32(np.nan).view(np.int32)
    answers = collective(ORACLE, [bucket.advance(one) for bucket, one in zip(buckets, answers, strict=True)])
    for pipeline, bucket, answer, gradient in zip(pipelines, buckets, answers, gradients, strict=True):
        assert pipeline.advance(bucket, answer, 1.0, lambda slots, reduced: None) is None
        pipeline.end_step()
        assert pipeline.stats().steps == 0, "the step has failed"
        np.testing.assert_array_equal(flat(ORACLE, pipeline), in_order(gradient))


def test_messages_stay_full_although_owners_keep_what_is_large() -> None:
    """What an owner keeps is large, but in its own region, from which it selects nothing for the others."""
    world, rng = 8, np.random.default_rng(0)
    pipelines = make_pipelines(
        ORACLE, compressors.TopK(0.004, warmup=None, **SETTINGS), {"a": (20_000,)}, workers=world
    )
    sent = []
    for _ in range(40):
        take_step(ORACLE, pipelines, [{"a": rng.laplace(size=20_000).astype(np.float32)} for _ in pipelines])
        sent += [pipeline.buckets[0].tally.last.sent for pipeline in pipelines]
    # Of k = 80 entries per step, 70 have room for 15 in each region of the others, which get 10 on average.
    assert np.mean(sent[-10 * world :]) >= 0.95 * 80


# --- regions ---


@given(numel=st.integers(1, 10_000), counts=loads)
def test_bounds_always_cover_the_bucket(numel: int, counts: list[int]) -> None:
    bounds = regions.uniform(numel, len(counts))
    for number in range(5):
        bounds = regions.balanced(bounds, counts, regions.gain(number))
        assert bounds[0] == 0 and bounds[-1] == numel and len(bounds) == len(counts) + 1
        assert regions.are_bounds(bounds)
