"""The cost model against hand-worked numbers and against itself."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.compressors.micro import MiCRO
from horovod_sparse.compressors.sidco import SIDCo
from horovod_sparse.exchange.cost import BYTES, allgather_bytes, allreduce_bytes, alltoall_bytes, break_even_ratio
from horovod_sparse.tools.plan import (
    BALANCED,
    COMPACT,
    DENSE16,
    DENSE32,
    METHODS,
    PAIRS,
    POWER,
    SHARED,
    UNION,
    Call,
    Method,
    Network,
)

FREE = Network(latency=0.0, bandwidth=1e9, wait=0.0)
"""Only bytes cost anything."""


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
    # Rank 4: of each matrix of 1024 x 1024, first 1024 x 4 numbers, then 4 x 1024.
    assert POWER.rounds(2**22, ratio, world) == [[Call("allreduce", 4 * 1024 * 4)]] * 2
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
    assert DENSE32.rounds(2**25, 1.0, 2) == [[Call("allreduce", 2**25)]]
    assert DENSE32.rounds(2**25 + 1, 1.0, 2) == [[Call("allreduce", 2**25), Call("allreduce", 1)]]
    assert DENSE16.rounds(2**25 + 1, 1.0, 2) == [[Call("allreduce", 2**25 + 1, 2)]]


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
