"""The cost model against hand-worked numbers and against itself."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.compressors.micro import MiCRO
from horovod_sparse.compressors.sidco import SIDCo
from horovod_sparse.compressors.topk import TopK
from horovod_sparse.exchange.cost import BYTES, allgather_bytes, allreduce_bytes, alltoall_bytes, break_even_ratio
from horovod_sparse.tools.plan import methods, network
from horovod_sparse.tools.plan.methods import (
    BALANCED,
    COMPACT,
    DENSE16,
    DENSE32,
    METHODS,
    MOST_WORKERS,
    PAIRS,
    SHARED,
    UNION,
    Method,
    break_even_workers,
    fastest,
)
from horovod_sparse.tools.plan.network import Call, Network

FREE = Network(latency=0.0, bandwidth=1e9, wait=0.0)
"""Only bytes cost anything."""
EXACT_PAIRS = Method("pairs without spare room", "TopK({ratio})", methods.pairs(TopK))
SPARSE = [method for method in METHODS if method not in (DENSE32, DENSE16)]


def test_bytes() -> None:
    assert allreduce_bytes(4000, 1) == 0
    assert allreduce_bytes(4000, 2) == 4000
    assert allreduce_bytes(2000, 4) == 3000
    assert allgather_bytes(80, 1) == 0
    assert allgather_bytes(80, 4) == 240
    assert alltoall_bytes(80, 1) == 0
    assert alltoall_bytes(80, 4) == 60


@pytest.mark.parametrize("world", [2, 8, 50, 500])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_costs_are_equal_at_the_break_even_ratio(itemsize: int, world: int) -> None:
    numel = 8_000_000
    pairs = round(break_even_ratio(itemsize, world) * numel)
    assert allgather_bytes(8 * pairs, world) == pytest.approx(allreduce_bytes(numel * itemsize, world), rel=1e-3)


def test_known_break_even_points() -> None:
    """At 0.1 % pairs lose to dense float16 beyond 500 workers, at 1 % beyond 50."""
    assert break_even_ratio(2, 500) == pytest.approx(0.001)
    assert break_even_ratio(2, 50) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        # 2 * 3 messages; 2 * 3/4 of 4000 bytes.
        (Call("allreduce", 1000), 0.01 + 6 * 0.001 + 6000 / 1e6),
        (Call("allreduce", 1000, itemsize=2), 0.01 + 6 * 0.001 + 3000 / 1e6),
        # 3 messages of 4000 bytes.
        (Call("allgather", 1000), 0.01 + 3 * 0.001 + 12_000 / 1e6),
        # 3 messages with the lengths, then 3 of 1000 bytes.
        (Call("alltoall", 1000), 0.01 + 6 * 0.001 + 3000 / 1e6),
    ],
)
def test_seconds_worked_by_hand(call: Call, seconds: float) -> None:
    where = Network(latency=0.001, bandwidth=1e6, wait=0.01)
    assert where.seconds([[call]], 4) == pytest.approx(seconds)
    # Together they wait once, one after the other twice.
    assert where.seconds([[call, call]], 4) == pytest.approx(2 * seconds - 0.01)
    assert where.seconds([[call], [call]], 4) == pytest.approx(2 * seconds)


def test_messages_worked_by_hand() -> None:
    """Two buckets, of 6,553,600 and 3,446,400 entries; 8 workers; ratio 0.001: k is 6553 and 3446."""
    numel, ratio, world = 10_000_000, 0.001, 8
    assert DENSE32.rounds(numel, ratio, world) == [[Call("allreduce", numel)]]
    assert DENSE16.rounds(numel, ratio, world) == [[Call("allreduce", numel, 2)]]
    # SIDCo has room for 1.25 k.
    assert PAIRS.rounds(numel, ratio, world) == [(Call("allgather", 2 * 8192), Call("allgather", 2 * 4308))]
    assert COMPACT.rounds(numel, ratio, world) == [(Call("allgather", 100 + 8192), Call("allgather", 53 + 4308))]
    # To each worker 1.5/8 of the room, and from each an eighth of k.
    assert BALANCED.rounds(numel, ratio, world) == [
        (Call("alltoall", 8 * 2 * 1536), Call("alltoall", 8 * 2 * 808)),
        (Call("allgather", 2 * (820 + 1)), Call("allgather", 2 * (431 + 1))),
    ]
    # MiCRO has room for 2 k, divided among the workers.
    assert UNION.rounds(numel, ratio, world) == [
        (Call("allgather", 2 + 1639), Call("allgather", 2 + 862)),
        (Call("allreduce", 8 * 1639), Call("allreduce", 8 * 862)),
    ]
    assert SHARED.rounds(numel, ratio, world) == [(Call("allreduce", 6553 + 17), Call("allreduce", 3446 + 17))]


def test_dense_gradients_are_fused_as_horovod_does() -> None:
    """128 MiB hold 2^25 numbers of 4 bytes."""
    assert network.dense(2**25, 4) == [Call("allreduce", 2**25)]
    assert network.dense(2**25 + 1, 4) == [Call("allreduce", 2**25), Call("allreduce", 1)]
    assert network.dense(2**25 + 1, 2) == [Call("allreduce", 2**25 + 1, 2)]


networks = st.builds(Network, latency=st.floats(0.0, 0.01), bandwidth=st.floats(1e6, 1e11), wait=st.floats(0.0, 0.01))
calls = st.builds(Call, st.sampled_from(sorted(BYTES)), st.integers(1, 10**8), st.sampled_from([2, 4]))
rounds = st.lists(st.lists(calls, min_size=1, max_size=3), min_size=1, max_size=3)


@given(networks, rounds, st.integers(2, 1000))
def test_more_of_anything_takes_longer(where: Network, given_rounds: list[list[Call]], world: int) -> None:
    seconds = where.seconds(given_rounds, world)
    longer = [[call._replace(length=2 * call.length) for call in together] for together in given_rounds]
    assert where.seconds(longer, world) > seconds
    assert where.seconds(given_rounds, world + 1) > seconds
    later = Network(where.latency + 0.001, where.bandwidth, where.wait)
    assert later.seconds(given_rounds, world) > seconds
    slower = Network(where.latency, where.bandwidth / 2, where.wait)
    assert slower.seconds(given_rounds, world) > seconds
    waiting = Network(where.latency, where.bandwidth, where.wait + 0.001)
    assert waiting.seconds(given_rounds, world) == pytest.approx(seconds + 0.001 * len(given_rounds))


@given(st.integers(1, 10**9), st.floats(1e-6, 1.0), st.integers(2, 1000))
def test_what_a_step_sends_is_what_its_collectives_send(numel: int, ratio: float, world: int) -> None:
    for method in METHODS:
        sent = method.bytes_sent(numel, ratio, world)
        assert method.seconds(FREE, numel, ratio, world) == pytest.approx(sent / 1e9)
    # Every bucket has its message, and no entry is lost between buckets.
    entries = sum(call.length for (together,) in [SHARED.rounds(numel, 1.0, world)] for call in together)
    assert entries == numel + 17 * math.ceil(numel / (25 * 2**18))


@given(st.integers(10**6, 10**9), st.floats(1e-4, 1.0), st.integers(2, 1000))
def test_compact_pairs_send_half_of_pairs_and_the_runs(numel: int, ratio: float, world: int) -> None:
    (pairs,), (compact,) = PAIRS.rounds(numel, ratio, world), COMPACT.rounds(numel, ratio, world)
    assert len(pairs) == len(compact)
    runs = sum(small.length - large.length // 2 for small, large in zip(compact, pairs, strict=True))
    assert runs == sum(math.ceil(min(25 * 2**18, numel - start) / 65_536) for start in range(0, numel, 25 * 2**18))


@pytest.mark.parametrize(("method", "compressor"), [(PAIRS, SIDCo), (UNION, MiCRO)])
def test_messages_are_as_long_as_the_compressor_says(method: Method, compressor: type) -> None:
    numel, world = 1_000_000, 8
    made = compressor(0.01)
    capacity = made.message_capacity(numel, made.target_count(numel), world)
    first = method.rounds(numel, 0.01, world)[0][0]
    assert first.length == (2 * capacity if method is PAIRS else 2 + capacity)


@pytest.mark.parametrize("world", [2, 8, 50, 500])
@pytest.mark.parametrize(("dense", "itemsize"), [(DENSE32, 4), (DENSE16, 2)])
def test_the_search_finds_the_break_even_ratio(dense: Method, itemsize: int, world: int) -> None:
    """Where only bytes count and messages have no spare room, it is that of the formula."""
    numel = 20_000_000
    found = methods.break_even_ratio(FREE, numel, world, EXACT_PAIRS, dense)
    # Each of the four buckets sends whole entries.
    assert found == pytest.approx(break_even_ratio(itemsize, world), abs=4 / numel)


@pytest.mark.parametrize("where", [FREE, Network(50e-6, 125e6), Network(0.001, 1e9)], ids=["free", "1gbit", "far"])
@pytest.mark.parametrize("dense", [DENSE32, DENSE16], ids=lambda method: method.title)
@pytest.mark.parametrize("method", [PAIRS, EXACT_PAIRS, COMPACT], ids=lambda method: method.title)
def test_beyond_the_break_even_point_dense_wins(method: Method, dense: Method, where: Network) -> None:
    numel, ratio = 25_000_000, 0.005
    most = break_even_workers(where, numel, ratio, method, dense)
    assert 2 <= most < MOST_WORKERS
    for world in [*range(2, 300), most, most + 1]:
        wins = method.seconds(where, numel, ratio, world) < dense.seconds(where, numel, ratio, world)
        assert wins == (world <= most)
    largest = methods.break_even_ratio(where, numel, 8, method, dense)
    limit = dense.seconds(where, numel, 1.0, 8)
    assert method.seconds(where, numel, 0.999 * largest, 8) < limit <= method.seconds(where, numel, 1.001 * largest, 8)


def test_break_even_points_that_do_not_exist() -> None:
    slow = Network(latency=1.0, bandwidth=1e12, wait=0.0)
    # Four buckets take 4 (n - 1) messages, a dense allreduce 2 (n - 1).
    assert break_even_workers(slow, 25_000_000, 1e-6, PAIRS, DENSE32) == 0
    assert methods.break_even_ratio(slow, 25_000_000, 8, PAIRS, DENSE32) == 0.0
    # One bucket takes n - 1.
    assert break_even_workers(slow, 1_000_000, 1e-6, PAIRS, DENSE32) == MOST_WORKERS
    assert methods.break_even_ratio(FREE, 1_000_000, 8, COMPACT, DENSE32) < 1.0
    assert methods.break_even_ratio(slow, 1_000_000, 2, PAIRS, DENSE32) == 1.0


def test_the_fastest_method_takes_the_least_time() -> None:
    assert fastest(FREE, 25_000_000, 0.5, 64) is DENSE16
    assert fastest(FREE, 25_000_000, 0.001, 64) is SHARED
    # Many messages cost more than many bytes, and compact pairs need the fewest of both.
    assert fastest(Network(50e-6, 1.25e9), 25_000_000, 0.001, 64) is COMPACT
    for method in SPARSE:
        assert fastest(FREE, 25_000_000, 0.001, 64, [DENSE32, method]) is method


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 1e9), "latency must be a finite number of seconds >= 0, got -1.0"),
        ((math.nan, 1e9), "latency must be a finite number of seconds >= 0, got nan"),
        ((0.0, 0.0), "bandwidth must be a finite number of bytes per second > 0, got 0.0"),
        ((0.0, math.inf), "bandwidth must be a finite number of bytes per second > 0, got inf"),
        ((0.0, 1e9, -0.5), "wait must be a finite number of seconds >= 0, got -0.5"),
    ],
)
def test_networks_that_cannot_be_are_refused(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Network(*arguments)
