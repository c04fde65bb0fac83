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
from table import BACKENDS, COMPRESSORS, ORACLE, WITH_OPERATIONS, Backend, Row

from horovod_sparse import compressors
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.exchange import regions
from horovod_sparse.exchange.protocols import Exchange
from horovod_sparse.public import Balanced, Hierarchical, MomentumCorrection

NUMEL = 97
SHAPES = {"a": (7, 5), "b": (62,)}
SKEWED = np.linspace(4, 0.1, NUMEL)
SETTINGS: dict[str, Any] = {"min_numel": 0, "granularity": "model", "exchange": Balanced()}


def pipelines_of(backend: Backend, workers: int | str, compressor: Any, **settings: Any) -> list[Pipeline]:
    return make_pipelines(backend, compressor, SHAPES, workers, **settings)


def of_parameters(gradient: np.ndarray) -> dict[str, np.ndarray]:
    """The last parameter is the first in the bucket."""
    return {"b": gradient[:62].copy(), "a": gradient[62:].reshape(7, 5).copy()}


def arrive(backend: Backend, pipelines: Sequence[Pipeline], gradients: Sequence[np.ndarray]) -> None:
    for pipeline, gradient in zip(pipelines, gradients, strict=True):
        for name, part in of_parameters(gradient).items():
            pipeline.arrive(name, backend.array(part))


def flat(backend: Backend, pipeline: Pipeline) -> np.ndarray:
    """The residual as NumPy has it."""
    return backend.numpy(pipeline.buckets[0].buffer).copy()


def step(backend: Backend, pipelines: Sequence[Pipeline], gradients: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """One step of all ranks; every rank's reduced gradient, not divided, in the order of the bucket."""
    results = take_step(backend, pipelines, list(map(of_parameters, gradients)))
    if results[0]["a"] is None:
        return None
    return [np.concatenate([dense_sum(one["b"], 62), dense_sum(one["a"], 35)]) for one in results]


def dyadic(rng: np.random.Generator, count: int, spread: Any = 1.0) -> list[np.ndarray]:
    """Gradients whose sums are exact in float32, in any order."""
    return [(np.round(rng.laplace(size=NUMEL) * 64 * spread) / 64).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize(
    ("k", "capacity", "world", "room"),
    [(100, 100, 4, 38), (100, 125, 4, 38), (100, 1600, 4, 400), (2, 4, 2, 2), (1, 1, 64, 1), (96, 120, 1024, 1)],
)
def test_the_room_of_a_region(k: int, capacity: int, world: int, room: int) -> None:
    """A large slack is kept. With a small one there is half as much again as each region gets if all get as many."""
    assert regions.room(k, capacity, world) == room


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
            sent = here[largest(others[here], regions.room(k, k, world))]
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
    before = [flat(backend, one) + gradient for one, gradient in zip(pipelines, gradients, strict=True)]
    reduced, kept = expected(before)
    results = step(backend, pipelines, gradients)
    assert results is not None
    for result, pipeline, mine in zip(results, pipelines, kept, strict=True):
        np.testing.assert_array_equal(result, reduced)
        np.testing.assert_array_equal(flat(backend, pipeline), mine)


@given(world=st.integers(1, 5), seed=st.integers(0, 999), ratio=st.sampled_from([0.02, 0.1, 0.3, 1.0]))
@pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
def test_every_step_is_as_in_dense_arrays(backend: Backend, world: int, seed: int, ratio: float) -> None:
    pipelines = pipelines_of(backend, world, compressors.TopK(ratio, warmup=None, **SETTINGS))
    rng, k = np.random.default_rng(seed), max(1, int(ratio * NUMEL))
    bounds = regions.uniform(NUMEL, world)
    for _ in range(4):
        check_step(backend, pipelines, rng, partial(reference, k=k, bounds=bounds))
        bounds = pipelines[0].buckets[0].state.bounds
        assert all(pipeline.buckets[0].state.bounds == bounds for pipeline in pipelines)


OWNED: dict[str, tuple[Exchange, int | str]] = {"balanced": (Balanced(), 4), "hierarchical": (Hierarchical(), "aabb")}
"""Exchanges in which workers own entries, and their workers."""


OWNING = [
    (way, row)
    for way, (exchange, _) in OWNED.items()
    for row in COMPRESSORS
    if exchange.needs in row.cls.chooses and not ("exchange" in row.settings or row.momentum)
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("way", "row"), OWNING, ids=str)
def test_sent_and_kept_are_what_came(way: str, row: Row, dtype: str) -> None:
    """For every compressor that sends pairs. A step whose gradient is not finite changes nothing but its finite entries."""
    (exchange, workers), rng = OWNED[way], np.random.default_rng(3)
    compressor = row.make(0.1, **{**SETTINGS, "exchange": exchange, "not_finite": "propagate", "residual": dtype})
    pipelines = pipelines_of(ORACLE, workers, compressor, dtype=dtype)
    total = np.zeros(NUMEL)
    for number in range(6):
        gradients = dyadic(rng, len(pipelines))
        if number == 3:
            gradients[2][40] = np.nan
        total += np.sum([np.nan_to_num(gradient) for gradient in gradients], axis=0, dtype=np.float64)
        before = [flat(ORACLE, one) + np.nan_to_num(g) for one, g in zip(pipelines, gradients, strict=True)]
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
    # Rank 0 owns the first 48 entries. k = 9, so each forwards 5 and sends 5 to the other.
    for rank, pipeline in enumerate(pipelines):
        mine = np.arange(NUMEL) < 48 if rank == 0 else np.arange(NUMEL) >= 48
        forwarded = mine & (results[0] != 0)
        sent = ~mine & (flat(ORACLE, pipeline) == 0)
        assert forwarded.sum() == sent.sum() == 5
        np.testing.assert_array_equal(pipeline.buckets[0].velocity == 0, (forwarded | sent) & masking)


def test_bounds_are_a_part_of_the_state_and_begin_anew_with_other_workers() -> None:
    rng, compressor = np.random.default_rng(2), compressors.SIDCo(0.2, warmup=None, **SETTINGS)
    main, same, fewer, afresh = (pipelines_of(ORACLE, world, compressor) for world in (3, 3, 2, 2))
    for _ in range(5):
        step(ORACLE, main, dyadic(rng, 3, SKEWED))
    for pipelines, keeps in ((same, True), (fewer, True), (afresh, False)):
        for one, other in zip(main, pipelines, strict=False):
            state = one.state_dict()
            for adaptive in () if keeps else state["adaptive"].values():
                adaptive.pop("bounds")
            other.load_state_dict(state)
    assert same[0].buckets[0].state.bounds == main[0].buckets[0].state.bounds != regions.uniform(NUMEL, 3)
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
    gradients[0][[1, 47, 50]] = 1.0, -2.0, 0.5
    gradients[1][[47, 61]] = 4.0, 8.0
    arrive(backend, pipelines, gradients)
    buckets = [one.buckets[0] for one in pipelines]
    first = [bucket.begin() for bucket in buckets]
    assert [one.kind for one in first] == ["alltoall"] * 2
    # k = 2, of which one is selected from the other's region. There is room for 2 entries for each region.
    empty = [-1, 0]
    rows = [
        [empty, empty, [2, 0x3F000000], empty],
        [[47, 0x40800000], empty, empty, empty],
    ]
    for one, expected in zip(first, rows, strict=True):
        got = backend.numpy(one.message)
        assert got.dtype == np.int32 and got.shape == (4, 2)
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


Change = Callable[[np.ndarray], np.ndarray]
"""What becomes of a copy of what a rank has received."""


def put(share: float, value: Any, *column: int) -> Change:
    """Another number, at this share of the rows."""

    def change(received: np.ndarray) -> np.ndarray:
        received[(int(share * len(received)), *column)] = value
        return received

    return change


def other_sign(pairs: np.ndarray) -> np.ndarray:
    pairs[0, 1] ^= -(2**31)
    return pairs


def with_owners(backend: Backend, way: str) -> list[Pipeline]:
    exchange, workers = OWNED[way]
    return pipelines_of(backend, workers, compressors.TopK(0.1, warmup=None, **{**SETTINGS, "exchange": exchange}))


def errors_with(
    backend: Backend, pipelines: list[Pipeline], gradients: list[np.ndarray], damage: tuple[int, list[int], Change]
) -> list[str]:
    """The errors of all ranks in a step in which some receive something else: in which round, who, what. "" is no error."""
    number, ranks, change = damage
    arrive(backend, pipelines, gradients)
    buckets, errors = [one.buckets[0] for one in pipelines], []
    requests, rounds = [bucket.begin() for bucket in buckets], len(buckets[0].rounds_of(buckets[0].exchange))
    for now in range(rounds):
        answers = collective(backend, requests)
        for rank in ranks if now == number else ():
            answers[rank] = backend.array(change(backend.numpy(answers[rank]).copy()))
        if now < rounds - 1:
            requests = [bucket.advance(answer) for bucket, answer in zip(buckets, answers, strict=True)]
    for pipeline, bucket, answer in zip(pipelines, buckets, answers, strict=True):
        try:
            pipeline.advance(bucket, answer, 1.0, lambda slots, reduced: None)
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


PART = "the message to worker 0 for bucket 'b' is damaged: its indices do not ascend"
COPY, WORKER = "another copy than worker 0", "the message of worker 1 for bucket 'b' is damaged"
DAMAGE: dict[str, tuple[str, int, list[int], Change, str]] = {
    "an index beyond the region": ("balanced", 0, [0], put(0.25, 24, 0), PART),
    "an index beyond the bucket": ("balanced", 0, [0], put(0.25, 97, 0), PART),
    "a negative index": ("balanced", 0, [0], put(0.25, -2, 0), PART),
    "descending": ("balanced", 0, [0], put(0.75, 23, 0), PART),
    "values, shorter": ("hierarchical", 0, [2], lambda values: values[:-1], "disagree"),
    "values, of another type": ("hierarchical", 0, [2], lambda values: values.astype(np.float64), "disagree"),
    "pairs of one shard, shorter": ("hierarchical", 1, [2], lambda pairs: pairs[:-1], "disagree"),
    "pairs of one shard, another index": ("hierarchical", 1, [2], put(0.25, 97, 0), COPY),
    "pairs of one shard, another value": ("hierarchical", 1, [0], other_sign, COPY),
    "all pairs, shorter, one copy": ("hierarchical", 2, [3], lambda pairs: pairs[:-1], "disagree"),
    "all pairs, another index, one copy": ("hierarchical", 2, [3], put(0.25, 97, 0), f"worker 3 has received {COPY}"),
    "all pairs, another value, one copy": ("hierarchical", 2, [1], other_sign, f"worker 1 has received {COPY}"),
    "all pairs, another index": ("hierarchical", 2, [0, 1, 2, 3], put(0.25, 97, 0), WORKER),
    "all pairs, a negative index": ("hierarchical", 2, [0, 1, 2, 3], put(0.25, -4, 0), WORKER),
}
"""The exchange, the round, who receives something else, what, and what all ranks say."""


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
def test_what_one_rank_or_all_receive_damaged_is_an_error_on_all(backend: Backend, name: str) -> None:
    """None is left waiting, and none applies what another refuses."""
    way, number, ranks, change, text = DAMAGE[name]
    pipelines = with_owners(backend, way)
    gradients = dyadic(np.random.default_rng(4), 4)
    errors = errors_with(backend, pipelines, gradients, (number, ranks, change))
    assert all(text in error for error in errors), errors
    for pipeline, gradient in zip(pipelines, gradients, strict=True):
        pipeline.abort()
        np.testing.assert_array_equal(flat(backend, pipeline), gradient)


NAN = np.float32(np.nan).view(np.int32)


@pytest.mark.parametrize(
    ("way", "change"),
    [("balanced", put(0.25, NAN, 1)), ("hierarchical", put(0.0, np.nan)), ("hierarchical", put(0.5, np.nan))],
)
def test_nan_among_received_values_fails_the_step_and_is_not_kept(way: str, change: Change) -> None:
    pipelines = with_owners(ORACLE, way)
    gradients = dyadic(np.random.default_rng(4), 4)
    assert errors_with(ORACLE, pipelines, gradients, (0, [2], change)) == [""] * 4
    for pipeline, gradient in zip(pipelines, gradients, strict=True):
        with pytest.raises(FloatingPointError, match="holds NaN or infinity"):
            pipeline.end_step()
        np.testing.assert_array_equal(flat(ORACLE, pipeline), gradient)


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


@given(numel=st.integers(1, 10_000), counts=st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_bounds_always_cover_the_bucket(numel: int, counts: list[int]) -> None:
    bounds = regions.uniform(numel, len(counts))
    for number in range(5):
        bounds = regions.balanced(bounds, counts, regions.gain(number))
        assert bounds[0] == 0 and bounds[-1] == numel and len(bounds) == len(counts) + 1
        assert regions.are_bounds([*bounds])
