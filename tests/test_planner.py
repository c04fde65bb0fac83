"""The plan: what it chooses, that it is never slower than half precision in the model, and that every backend follows it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from driver import collective, dense_sum, exchange, make_pipeline
from hypothesis import given
from hypothesis import strategies as st
from table import BACKENDS, COMPRESSORS, ORACLE, Backend

from horovod_sparse import compressors
from horovod_sparse.compressors.schedules import warmup
from horovod_sparse.core.costs import measured_costs
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.core.selector import no_device
from horovod_sparse.exchange import planner, protocols, wire
from horovod_sparse.exchange.measure import Effort, measure
from horovod_sparse.exchange.network import Call, Network, parse_network
from horovod_sparse.exchange.planner import BALANCED, COMPACT, HALF, PAIRS, Conditions, Costs, Planner
from horovod_sparse.exchange.rounds import Way

NUMEL = 1000
SHAPES = {"a": (20, 20), "b": (600,)}
WAYS = (PAIRS, COMPACT, BALANCED, HALF)

networks = st.builds(Network, st.floats(0, 0.1), st.floats(1e3, 1e12), st.floats(0, 0.01))
speeds = st.floats(0, 1e-6)
all_conditions = st.builds(Conditions, networks, st.builds(Costs, *[speeds] * 6))
worlds = st.integers(2, 4096)


def gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((step, rank))
    return {name: rng.laplace(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def pipelines_of(backend: Backend, compressor: Any, world: int = 3) -> list[Pipeline]:
    return [make_pipeline(backend, compressor, SHAPES, world=world, position=rank) for rank in range(world)]


def step(backend: Backend, pipelines: list[Pipeline], number: int) -> list[np.ndarray]:
    """One step of all ranks; what each gets."""
    for rank, pipeline in enumerate(pipelines):
        pipeline.start_step()
        for name, gradient in gradients(number, rank).items():
            pipeline.arrive(name, backend.array(gradient))
    got: list[list[np.ndarray]] = [[] for _ in pipelines]
    for buckets in zip(*(pipeline.buckets for pipeline in pipelines), strict=True):
        for mine, reduced in zip(got, exchange(backend, pipelines, buckets), strict=True):
            mine += [dense_sum(parts, int(np.prod(SHAPES[name]))) for name, parts in sorted(reduced.items())]
    for pipeline in pipelines:
        pipeline.end_step()
    return [np.concatenate(mine) for mine in got]


def restrict(pipeline: Pipeline, way: Way) -> None:
    """Leave the plan no choice."""
    assert pipeline.planner is not None
    pipeline.planner.ways = [way]
    pipeline.planner._known.clear()


def exchanges_of(pipeline: Pipeline) -> list[str]:
    return [bucket.exchange for bucket in pipeline.stats().last.buckets]


# --- the model ---


@given(all_conditions, worlds, st.integers(1, 2**28), st.floats(1e-5, 1), st.floats(1, 2), st.booleans())
def test_the_plan_is_never_slower_than_any_other_way(
    conditions: Conditions, world: int, numel: int, ratio: float, slack: float, balances: bool
) -> None:
    """In the model; so it is never slower than everything in half precision, where this is allowed."""
    plan, k = Planner(conditions, world, balances=balances), max(1, int(ratio * numel))
    bucket = numel, k, min(numel, int(np.ceil(slack * k)))
    chosen = plan.fastest(*bucket)
    allowed = [PAIRS, COMPACT, *[BALANCED] * balances, *[HALF] * (world <= wire.MOST_HALF_WORKERS)]
    assert chosen in allowed
    assert plan.seconds(chosen, *bucket) == min(plan.seconds(way, *bucket) for way in allowed)
    # Another planner of the same numbers chooses the same, whatever it was asked before.
    other = Planner(conditions, world, balances=balances)
    other.fastest(numel, 1, 1)
    assert other.fastest(*bucket) == chosen


@pytest.mark.parametrize(
    ("network", "world", "ratio", "way"),
    [
        ("1gbit", 2, 0.001, COMPACT),
        ("100gbit", 8, 0.5, HALF),
        ("1gbit", 64, 0.1, BALANCED),
        ("1gbit 0us", 512, 0.001, BALANCED),
        ("1gbit 1ms", 512, 0.0001, COMPACT),
        ("10mbit 0us", 2, 0.4, COMPACT),
    ],
)
def test_what_is_chosen_where(network: str, world: int, ratio: float, way: Way) -> None:
    k = int(ratio * 6_553_600)
    plan = Planner(Conditions(parse_network("network", network)), world, balances=True)
    assert plan.fastest(6_553_600, k, k).title == way.title


def test_processors_that_compute_slowly_are_taken_into_account() -> None:
    """On a fast network the selection would take longer than what it saves."""
    where = parse_network("network", "1tbit 0us")
    for costs, way in (
        (Costs(1e-8, 1e-9, 1e-9, 1e-10, 1e-8, 1e-9), HALF),
        (Costs(1e-10, 1e-9, 1e-10, 1e-8, 1e-8, 1e-9), PAIRS),
    ):
        assert Planner(Conditions(where, costs), 8, balances=False).fastest(10**7, 10**4, 10**4) == way


def test_what_owners_compute_is_taken_into_account() -> None:
    """On a fast network the balanced exchange sends less and computes more."""
    where = parse_network("network", "10gbit 0us")
    for owned, way in ((1e-9, BALANCED), (1e-7, PAIRS)):
        costs = Costs(1e-9, 1e-9, 1e-6, 1e-6, 1e-9, owned)
        assert Planner(Conditions(where, costs), 8, balances=True).fastest(10**7, 10**6, 10**6) == way


def test_half_precision_is_left_out_where_its_flags_do_not_add_up() -> None:
    where = Conditions(parse_network("network", "100gbit 0us"), Costs(1.0, 1.0, 1.0, 0.0, 1.0, 1.0))
    ways = {world: Planner(where, world, balances=True).fastest(10**7, 10**6, 10**6) for world in (2048, 2049)}
    assert ways[2048] == HALF and ways[2049] != HALF


@pytest.mark.parametrize("world", [2, 5])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.title)
def test_a_bucket_sends_what_the_model_says(way: Way, world: int) -> None:
    pipelines = [
        make_pipeline(
            ORACLE, compressors.TopK(0.01, network="1gbit"), {"p": (100_000,)}, world=world, position=position
        )
        for position in range(world)
    ]
    for pipeline in pipelines:
        restrict(pipeline, way)
        pipeline.arrive("p", np.random.default_rng(0).laplace(size=100_000).astype(np.float32))
    buckets = [pipeline.buckets[0] for pipeline in pipelines]
    following: list[Any] = [pipeline.begin(bucket) for pipeline, bucket in zip(pipelines, buckets, strict=True)]
    sent = []
    while following[0] is not None:
        message = following[0].message
        sent.append([Call(following[0].kind, message.size, message.itemsize)])
        answers = collective(ORACLE, following)
        following = [
            pipeline.advance(bucket, answer, 1.0, lambda slots, reduced: None)
            for pipeline, bucket, answer in zip(pipelines, buckets, answers, strict=True)
        ]
    assert sent == planner._rounds(way, 100_000, buckets[0].k, buckets[0].capacity, world)


# --- the setting ---


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency"),
    [
        ("1gbit", 125e6, 50e-6),
        ("10gbit 50us", 1.25e9, 50e-6),
        ("  1.2GB   0.1ms ", 1.2e9, 1e-4),
        ("100mbit 0us", 12.5e6, 0.0),
        ("100mbit 5 us", 12.5e6, 5e-6),
    ],
)
def test_networks_are_read(text: str, bandwidth: float, latency: float) -> None:
    assert parse_network("network", text) == Network(latency, bandwidth)
    assert compressors.TopK(0.1, network=text).network == text


@pytest.mark.parametrize(
    "text",
    ["", " ", "fast", "10", "10gbps", "0gbit", "-1gbit", "50us", "1gbit 50", "1gbit 50us 1ms", "Measured", "nan"],
)
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^network must be a bandwidth such as '100mbit', '10gbit'") as error:
        compressors.SIDCo(0.1, network=text)
    assert str(error.value).endswith(f"or 'measured', or None for no plan; got {text!r}")


@pytest.mark.parametrize("value", [1e9, True, ["1gbit"], b"1gbit"])
def test_what_is_no_text_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^network must be None, 'measured' or a bandwidth such as '10gbit', got "):
        compressors.TopK(0.1, network=value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: compressors.TopK(0.1, network="1gbit", balanced=True),
        lambda: compressors.TopK(0.1, network="1gbit", values="bfloat16"),
        lambda: compressors.TopK(0.1, network="1gbit", union=True),
        lambda: compressors.RandomK(0.1, network="measured"),
        lambda: compressors.MiCRO(0.1, network="1gbit"),
        lambda: compressors.NoOp(network="1gbit"),
    ],
)
def test_a_plan_needs_a_compressor_that_sends_pairs(make: Any) -> None:
    with pytest.raises(ValueError, match=r"^network must be None for .* leave these two at their defaults"):
        make()


# --- training ---


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.title)
def test_every_backend_follows_the_plan_as_the_oracle_does(backend: Backend, way: Way, dtype: str) -> None:
    """The same bits reduced and kept, and the same statistics."""
    runs = []
    for one in (ORACLE, backend):
        compressor = compressors.SIDCo(0.05, network="1gbit", min_numel=0, residual_dtype=dtype)
        pipelines = [make_pipeline(one, compressor, SHAPES, world=3, position=rank, dtype=dtype) for rank in range(3)]
        for pipeline in pipelines:
            restrict(pipeline, way)
        seen = []
        for number in range(4):
            results = step(one, pipelines, number)
            assert all(result.tobytes() == results[0].tobytes() for result in results)
            seen.append(results[0].tobytes())
        assert exchanges_of(pipelines[0]) == [way.title]
        seen += [one.numpy(bucket.buffer).tobytes() for pipeline in pipelines for bucket in pipeline.buckets]
        runs.append((seen, [pipeline.stats().last.total.bytes_sent for pipeline in pipelines]))
    assert runs[0] == runs[1]


def test_the_plan_follows_the_schedule() -> None:
    """Everything in float32, then in half precision while the ratio is high, then pairs; nothing is lost on the way."""
    compressor = compressors.TopK(warmup(0.9, 0.005, 4, stairs=2), network="100kbit 0us", min_numel=0, dense_steps=2)
    pipelines, seen = pipelines_of(ORACLE, compressor, 2), []
    total = np.zeros(NUMEL)
    for number in range(10):
        total += np.sum([np.concatenate([*map(np.ravel, gradients(number, r).values())]) for r in range(2)], axis=0)
        total -= step(ORACLE, pipelines, number)[0]
        seen.append(exchanges_of(pipelines[0])[0])
        assert exchanges_of(pipelines[1]) == exchanges_of(pipelines[0])
    assert [title for title, _ in itertools.groupby(seen)] == ["dense", "dense float16", "compact pairs"]
    kept = np.sum([ORACLE.numpy(one.buckets[0].buffer) for one in pipelines], axis=0, dtype=np.float64)
    # In the bucket, "b" comes first.
    np.testing.assert_allclose(kept, np.concatenate([total[400:], total[:400]]), atol=0.02)


def test_ranks_in_other_steps_of_a_schedule_meet_the_usual_collective() -> None:
    """Without it, ranks whose plans differ would wait for each other forever."""
    scheduled = compressors.TopK(warmup(0.9, 0.005, 4, stairs=2), network="100kbit 0us", min_numel=0)
    constant = compressors.TopK(0.9, network="100kbit 0us", min_numel=0, dense_steps=1)
    for compressor, markers in ((scheduled, {"dense float16": "allgather", "compact pairs": None}), (constant, {})):
        pipelines = pipelines_of(ORACLE, compressor, 2)
        for number in range(8):
            step(ORACLE, pipelines, number)
            bucket = pipelines[0].buckets[0]
            assert bucket.stands_in == markers.get(bucket.way.title)


def test_a_saved_state_goes_on_with_the_same_plan() -> None:
    def make() -> list[Pipeline]:
        return pipelines_of(ORACLE, compressors.SIDCo(warmup(0.9, 0.01, 4, stairs=2), network="100kbit", min_numel=0))

    main, twin = make(), make()
    for number in range(3):
        step(ORACLE, main, number)
    for one, other in zip(main, twin, strict=True):
        other.load_state_dict(one.state_dict())
    for number in range(3, 9):
        assert [one.tobytes() for one in step(ORACLE, main, number)] == [
            one.tobytes() for one in step(ORACLE, twin, number)
        ]
        assert exchanges_of(main[0]) == exchanges_of(twin[0])


def test_one_worker_has_no_plan() -> None:
    for network in ("1gbit", "measured"):
        pipeline = make_pipeline(ORACLE, compressors.TopK(0.1, network=network), SHAPES)
        assert pipeline.planner is None and pipeline.buckets


def test_a_block_at_random_is_never_balanced() -> None:
    pipelines = pipelines_of(ORACLE, compressors.RandomBlock(0.1, shared=False, network="1bit 0us"))
    assert pipelines[0].planner is not None and BALANCED not in pipelines[0].planner.ways


@pytest.mark.parametrize("row", COMPRESSORS, ids=str)
def test_statistics_name_the_exchange(row: Any) -> None:
    names = {protocols.dense: "dense", protocols.union: "union", protocols.shared_indices: "shared indices"}
    compressor = row.make(0.1, min_numel=0, dense_steps=1)
    pipelines = pipelines_of(ORACLE, compressor, 2)
    step(ORACLE, pipelines, 0)
    assert exchanges_of(pipelines[0]) == ["dense"]
    step(ORACLE, pipelines, 1)
    pairs = "pairs" if compressor.values == "float32" else "compact pairs"
    assert exchanges_of(pipelines[0]) == [names.get(compressor.exchange, pairs)]
    assert pipelines[0].stats().mean.total.exchange == exchanges_of(pipelines[0])[0]


# --- measuring ---


class Alike:
    """`measure.Collectives` whose workers measure multiples of what this one measures. It takes no time."""

    world = 3

    def __init__(self, own: int) -> None:
        self.paces = [1.0, 4.0, 100.0]
        self.own = self.paces[own]
        self.calls: list[Any] = []

    def run(self, calls: Any, name: str) -> Any:
        self.calls.append((tuple(calls), name))
        return lambda: None

    def everyone(self, value: Any) -> list[Any]:
        return [value / self.own * pace for pace in self.paces]


def test_workers_that_measure_different_numbers_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has a clock of its own. All come to the same network, and have started the same collectives."""
    found = []
    for own in range(3):
        workers = Alike(own)
        monkeypatch.setattr(
            "horovod_sparse.exchange.measure.seconds", lambda run, repetitions, workers=workers: 0.03 * workers.own
        )
        found.append((measure(workers, Effort(3, 4, 0.01)), workers.calls))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("backend", BACKENDS[:3], ids=str)
def test_costs_are_measured(backend: Backend) -> None:
    like = backend.array(np.zeros(1, np.float32))
    compressor = compressors.SIDCo(0.01, network="measured", dense_steps=5, discardable=True)
    costs = measured_costs(backend.ops, compressor, like, no_device)
    assert 0 < costs.half < 1e-6 and 0 <= costs.select < 1e-6 and 0 <= costs.row < 1e-6
    assert 0 < costs.compact < 1e-6 and 0 < costs.balanced < 1e-6 and 0 <= costs.owned < 1e-6


def test_nothing_is_planned_before_it_is_measured() -> None:
    with pytest.raises(RuntimeError, match="measure must be called before there are buckets"):
        pipelines_of(ORACLE, compressors.TopK(0.1, network="measured"))
