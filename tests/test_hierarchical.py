"""The hierarchical exchange: the workers of a host act as one, nothing is lost, and all ranks get the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table import ORACLE, WITH_OPERATIONS, Backend
from test_balanced import NUMEL, check_step, dyadic, flat, largest, pipelines_of, step

from horovod_sparse import compressors
from horovod_sparse.exchange import regions
from horovod_sparse.exchange.grid import grid
from horovod_sparse.public import Hierarchical, MomentumCorrection, Pairs

SETTINGS: dict[str, Any] = {"min_numel": 0, "granularity": "model", "exchange": Hierarchical()}
GRIDS = ["aabb", "abab", "aaabbb", "abcabc", "abbaab", "ab", "aabbccdd"]
"""The host of each worker."""


def reference(
    residuals: Sequence[np.ndarray], k: int, groups: str, between: Pairs
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The exchange with TopK in dense arrays: what is reduced, and what every rank keeps."""
    reduced, kept = np.zeros(NUMEL, np.float32), [np.zeros(NUMEL, np.float32) for _ in groups]
    for host in sorted(set(groups)):
        members = [rank for rank, name in enumerate(groups) if name == host]
        total = np.sum([residuals[rank] for rank in members], axis=0)
        bounds = regions.uniform(NUMEL, len(members))
        for rank, (first, after) in zip(members, itertools.pairwise(bounds), strict=True):
            shard = total[first:after].copy()
            chosen = largest(shard, -(-k // len(members)))
            sent = shard[chosen]
            if between != Pairs():
                pairs = ORACLE.ops.pack(chosen, sent, len(chosen))
                between.packed(ORACLE.ops, shard.copy(), pairs)
                sent = ORACLE.ops.unpack(pairs, len(chosen))[1]
            reduced[first + chosen] += sent
            shard[chosen] -= sent
            kept[rank][first:after] = shard
    return reduced, kept


@given(groups=st.sampled_from(GRIDS), seed=st.integers(0, 999), ratio=st.sampled_from([0.02, 0.1, 0.3, 1.0]))
@pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
@pytest.mark.parametrize("between", [Pairs(), Pairs("packed")], ids=str)
def test_every_step_is_as_in_dense_arrays(
    between: Pairs, backend: Backend, groups: str, seed: int, ratio: float
) -> None:
    settings = {**SETTINGS, "exchange": Hierarchical(between=between)}
    pipelines = pipelines_of(backend, groups, compressors.TopK(ratio, warmup=None, **settings))
    rng, k = np.random.default_rng(seed), max(1, int(ratio * NUMEL))
    for _ in range(3):
        check_step(backend, pipelines, rng, partial(reference, k=k, groups=groups, between=between))


def test_a_sum_of_a_host_that_overflows_fails_the_step() -> None:
    pipelines = pipelines_of(ORACLE, "aabb", compressors.TopK(0.1, not_finite="propagate", warmup=None, **SETTINGS))
    gradients = [np.full(NUMEL, value, np.float32) for value in (3e38, 3e38, 1, 1)]
    assert step(ORACLE, pipelines, gradients) is None
    for pipeline, gradient in zip(pipelines, gradients, strict=True):
        np.testing.assert_array_equal(flat(ORACLE, pipeline), gradient)


@pytest.mark.parametrize("masking", [True, False])
def test_momentum_is_masked_where_the_host_has_sent(masking: bool) -> None:
    """All workers of a host stop the momentum of what any of them has sent for it."""
    correction = MomentumCorrection(0.5, masking=masking)
    pipelines = pipelines_of(ORACLE, "aabb", compressors.TopK(0.1, momentum=correction, warmup=None, **SETTINGS))
    gradients = [gradient + np.float32(10) for gradient in dyadic(np.random.default_rng(5), 4)]
    assert step(ORACLE, pipelines, gradients) is not None
    for host in (0, 2):
        members = pipelines[host : host + 2]
        # What a host has sent is zero in the residual of its owner.
        sent = np.sum([flat(ORACLE, one) for one in members], axis=0) == 0
        assert sent.sum() == 10
        for one in members:
            np.testing.assert_array_equal(one.buckets[0].velocity == 0, sent & masking)


# --- messages ---


def test_what_leaves_a_host_does_not_depend_on_its_slots() -> None:
    """Bytes that leave a host: those of one worker's pairs, to each of the other hosts."""
    sums = []
    for groups in ("ab", "aabb", "aaaabbbb"):
        pipelines = pipelines_of(ORACLE, groups, compressors.TopK(0.1, slack=1.0, warmup=None, **SETTINGS))
        step(ORACLE, pipelines, dyadic(np.random.default_rng(6), len(groups)))
        of_host = [one for one, name in zip(pipelines, groups, strict=True) if name == "a"]
        sums.append(sum(one.stats().last.total.bytes_sent for one in of_host))
    # k = 9, rounded up to a multiple of the slots; and each worker's number for all others.
    assert sums == [8 * 9 + 4, 8 * 10 + 2 * 3 * 4, 8 * 12 + 4 * 7 * 4]
    settings = {**SETTINGS, "exchange": Hierarchical(between=Pairs("packed"))}
    pipelines = pipelines_of(ORACLE, "ab", compressors.TopK(0.1, slack=1.0, warmup=None, **settings))
    step(ORACLE, pipelines, dyadic(np.random.default_rng(6), 2))
    assert pipelines[0].stats().last.total.bytes_sent == 4 * (2 + 7) + 4, (
        "one chunk, and 14 bits for each of 16 entries"
    )


# --- hosts and slots ---


@given(st.integers(2, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_worker_has_a_place_in_the_grid(hosts: int, slots: int, random: Any) -> None:
    groups = [f"host {number % hosts}" for number in range(hosts * slots)]
    random.shuffle(groups)
    places = [grid(groups, position) for position in range(len(groups))]
    for position, place in enumerate(places):
        assert place.hosts == hosts and place.slots == slots
        assert place.neighbours[place.slot] == position
        assert {groups[other] for other in place.neighbours} == {groups[position]}
        assert {places[other].slot for other in place.peers} == {place.slot} and position in place.peers
        assert sorted({*place.peers} & {*place.neighbours}) == [position]


@pytest.mark.parametrize("groups", ["aab", "aaa", "a", "abbcc"])
def test_what_is_not_a_grid_is_refused(groups: str) -> None:
    with pytest.raises(
        ValueError, match=r"Hierarchical needs at least two hosts .* same number of workers on each, got \{'a': "
    ):
        pipelines_of(ORACLE, groups, compressors.TopK(0.1, warmup=None, **SETTINGS))
