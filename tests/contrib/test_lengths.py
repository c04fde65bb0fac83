"""Lengths of updates: the mean of what workers send grows to be as long as one worker's update."""

from __future__ import annotations

import math

import numpy as np
import pytest

from horovod_sparse.contrib.lengths import Lengths, sampled
from tests.harness.workers import ExactLengths

SIZES = (10_000, 3, 0, 2_000)


def _means(updates: list[list[np.ndarray]]) -> list[float]:
    """Return what the workers' allreduce gives for these updates."""
    sent = []
    for update in updates:
        entries = np.concatenate([one[at] for one, at in zip(update, sampled(SIZES), strict=True)])
        sent.append([*entries, np.dot(entries, entries)])
    return [float(mean) for mean in np.mean(sent, axis=0)]


def _updates(world: int, signal: float, step: int) -> list[list[np.ndarray]]:
    """Return updates of root mean square 1, of which `signal` is the part that all workers have in common."""
    rng = np.random.default_rng(step)
    common = [rng.standard_normal(size) for size in SIZES]
    own = [[rng.standard_normal(size) for size in SIZES] for _ in range(world)]
    return [
        [math.sqrt(signal) * c + math.sqrt(1 - signal) * u for c, u in zip(common, one, strict=True)] for one in own
    ]


@pytest.mark.parametrize("world", [1, 2, 8, 64])
@pytest.mark.parametrize("signal", [0.0, 0.1, 1.0])
def test_the_mean_gets_the_length_of_one_update(world: int, signal: float) -> None:
    lengths, exact = Lengths(), ExactLengths(SIZES, world)
    for step in range(30):
        updates = _updates(world, signal, step)
        lengths.note(_means(updates))
        exact.note(updates)
    found = lengths.factor(world)
    assert found == pytest.approx(exact.factor, rel=1e-9)
    assert found == pytest.approx(1 / math.sqrt(signal + (1 - signal) / world), rel=0.1)
    assert 1.0 <= found <= math.sqrt(world)
    mean = np.concatenate(np.mean([np.concatenate(one) for one in _updates(world, signal, 99)], axis=0, keepdims=True))
    assert np.sqrt(np.mean((found * mean) ** 2)) == pytest.approx(1.0, rel=0.1)


def test_the_factor_has_bounds() -> None:
    lengths = Lengths()
    assert lengths.factor(4) == 1.0
    lengths.note([0.0, 0.0, 0.0])
    assert lengths.factor(4) == 1.0
    # The mean is zero, or too small for its square.
    lengths.note([0.0, 1e-200, 1.0])
    assert lengths.factor(4) == 2.0
    # Steps that are not finite leave no trace.
    before = lengths.state()
    for means in ([math.nan, 2.0, 9.0], [1.0, -math.inf, 9.0], [1.0, 2.0, math.nan], [1.0, 2.0, math.inf]):
        lengths.note(means)
        assert lengths.state() == before
    # Rounding can leave the mean longer than the updates.
    lengths.load(None)
    lengths.note([1.0, 1.0, 1.999999])
    assert lengths.factor(4) == 1.0


def test_sampled_positions_are_in_their_arrays_and_spread_over_all_entries() -> None:
    parts = sampled(SIZES)
    assert sum(map(len, parts)) == 256
    for part, size in zip(parts, SIZES, strict=True):
        assert ((part >= 0) & (part < size)).all()
    assert len(parts[0]) / 256 == pytest.approx(SIZES[0] / sum(SIZES), abs=0.1)
    assert [part.tolist() for part in parts] == [part.tolist() for part in sampled(SIZES)]
    assert [len(part) for part in sampled([0, 0])] == [0, 0] and sampled([]) == []
