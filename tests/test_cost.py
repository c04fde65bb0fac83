"""The cost model against hand-worked numbers and against itself."""

from __future__ import annotations

import pytest

from horovod_sparse.exchange.cost import allgather_bytes, allreduce_bytes, break_even_ratio


def test_bytes() -> None:
    assert allreduce_bytes(4000, 1) == 0
    assert allreduce_bytes(4000, 2) == 4000
    assert allreduce_bytes(2000, 4) == 3000
    assert allgather_bytes(80, 1) == 0
    assert allgather_bytes(80, 4) == 240


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
