"""The cost model against hand-worked numbers and against itself."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.exchange.cost import allreduce_bytes
from horovod_sparse.exchange.protocols import Round
from horovod_sparse.tools.plan import DENSE16, DENSE32, METHODS, POWER, SHARED, Network

FREE = Network(latency=0.0, bandwidth=1e9, wait=0.0)
"""Only bytes cost anything."""


def test_bytes() -> None:
    assert allreduce_bytes(4000, 1) == 0
    assert allreduce_bytes(4000, 2) == 4000
    assert allreduce_bytes(2000, 4) == 3000
    assert Round("allgather", 20).bytes_sent(1) == 0
    assert Round("allgather", 20).bytes_sent(4) == 240
    assert Round("allreduce", 500).bytes_sent(4) == 3000


@pytest.mark.parametrize(
    ("one", "seconds"),
    [
        # 2 * 3 messages; 2 * 3/4 of 4000 bytes.
        (Round("allreduce", 1000), 0.01 + 6 * 0.001 + 6000 / 1e6),
        (Round("allreduce", 1000, "float16"), 0.01 + 6 * 0.001 + 3000 / 1e6),
        # 3 messages of 4000 bytes.
        (Round("allgather", 1000), 0.01 + 3 * 0.001 + 12_000 / 1e6),
    ],
)
def test_seconds_worked_by_hand(one: Round, seconds: float) -> None:
    where = Network(latency=0.001, bandwidth=1e6, wait=0.01)
    assert where.seconds([[one]], 4) == pytest.approx(seconds)
    # Together they wait once, one after the other twice.
    assert where.seconds([[one, one]], 4) == pytest.approx(2 * seconds - 0.01)
    assert where.seconds([[one], [one]], 4) == pytest.approx(2 * seconds)


def test_dense_gradients_are_fused_as_horovod_does() -> None:
    """128 MiB hold 2^25 numbers of 4 bytes."""
    assert DENSE32.rounds(2**25, 1.0, 2) == [[Round("allreduce", 2**25, "float32")]]
    assert DENSE32.rounds(2**25 + 1, 1.0, 2) == [
        [Round("allreduce", 2**25, "float32"), Round("allreduce", 1, "float32")]
    ]
    assert DENSE16.rounds(2**25 + 1, 1.0, 2) == [[Round("allreduce", 2**25 + 1, "float16")]]


def test_factors_of_rank_4() -> None:
    """Of each matrix of 1024 x 1024, first 1024 x 4 numbers, then 4 x 1024."""
    assert POWER.rounds(2**22, 0.001, 8) == [[Round("allreduce", 4 * 1024 * 4, "float32")]] * 2


@given(st.integers(1, 10**9), st.floats(1e-6, 1.0), st.integers(2, 1000))
def test_what_a_step_sends_is_what_its_collectives_send(numel: int, ratio: float, world: int) -> None:
    for method in METHODS:
        sent = method.bytes_sent(numel, ratio, world)
        assert FREE.seconds(method.rounds(numel, ratio, world), world) == pytest.approx(sent / 1e9)
    # Every bucket has its message, and no entry is lost between buckets.
    entries = sum(call.length for (together,) in [SHARED.rounds(numel, 1.0, world)] for call in together)
    assert entries == numel + 17 * math.ceil(numel / (25 * 2**18))
