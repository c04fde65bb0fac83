"""What a selection of the largest leaves of the squared norm, and what error feedback makes of it.

Of what is left there are two bounds, and the tighter one holds for some gradients only.

Of d entries with squares s_1 >= ... >= s_d the k largest leave at most 1 - k/d. They leave at most (1 - k/d)^2 if
s_i / (2 (d - i) + 1) does not increase with i, since (1 - k/d)^2 is what the k largest leave of 2 (d - i) + 1. Squares
that are convex in i and end at zero are of that kind (Gaussian-k, https://arxiv.org/abs/1911.08772, Theorem 1).

With error feedback a step leaves at most sqrt(1 - delta) of the residual's and the gradient's norm together, delta = k/d.
So the residual is never larger than sqrt(1 - delta) / (1 - sqrt(1 - delta)) <= 2 sqrt(1 - delta) / delta times the largest
gradient (https://arxiv.org/abs/1901.09847, Lemma 3), and what was sent is never further than that from what was given.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.compressors.topk import TopK
from horovod_sparse.numpy import SparseAllreduce, VirtualWorkers
from tests.harness.table import COMPRESSORS, ORACLE, Row
from tests.harness.workers import make_worker, send

SIZE = 1000
LOWER = np.arange(1, SIZE + 1) / SIZE
"""Parts of the entries, from the largest entry to the smallest."""
CONVEX = {
    "a line": np.sqrt(1.0 - LOWER),
    "uniform": 1.0 - LOWER,
    "Gaussian": np.array([NormalDist().inv_cdf(1.0 - part / 2.0) for part in LOWER]),
    "Laplace": -np.log(LOWER),
    "Pareto": LOWER**-0.3 - 1.0,
    "one entry": np.eye(1, SIZE)[0],
}
"""Magnitudes whose squares are convex and end at zero."""
NOT_CONVEX = {
    "all equal": np.ones(SIZE),
    "below the line": np.sqrt(np.r_[1.0, np.full(599, 0.4), np.zeros(400)]),
    "above the line": np.sqrt(1.0 - LOWER**2),
}


def shuffled(magnitudes: np.ndarray) -> np.ndarray:
    """A gradient with these magnitudes."""
    rng = np.random.default_rng(9)
    signs = rng.choice([-1.0, 1.0], size=magnitudes.size)
    return rng.permutation(signs * magnitudes).astype(np.float32)


def left_by(row: Row, gradient: np.ndarray, ratio: float) -> tuple[float, float]:
    """The part of the squared norm that a first step leaves behind, and 1 - count/d."""
    worker = make_worker(ORACLE, row.make(ratio), {"p": (gradient.size,)})
    before, indices, _ = send(ORACLE, worker, gradient)
    squares = np.square(before, dtype=np.float64)
    return float(1.0 - squares[indices].sum() / squares.sum()), 1.0 - indices.size / gradient.size


TOPK = Row("topk", TopK)
largest = pytest.mark.parametrize("row", [row for row in COMPRESSORS if row.largest], ids=str)


@largest
def test_the_tighter_bound_holds_where_squares_are_convex(row: Row) -> None:
    for name, magnitudes in CONVEX.items():
        for ratio in row.ratios:
            left, linear = left_by(row, shuffled(magnitudes), ratio)
            assert left <= linear**2 + 1e-6, f"{name}, ratio {ratio}"


@given(steps=st.lists(st.integers(0, 1000), min_size=2, max_size=200), part=st.floats(0.0, 1.0))
def test_the_tighter_bound_holds_for_any_convex_squares(steps: list[int], part: float) -> None:
    # From the smallest square, which is zero, the steps to the next one only grow.
    squares = np.r_[0.0, np.cumsum(np.sort(steps))]
    if squares[-1] > 0.0:
        left, linear = left_by(TOPK, shuffled(np.sqrt(squares)), max(1.0, part * squares.size) / squares.size)
        assert left <= linear**2 + 1e-6


@pytest.mark.parametrize("name", NOT_CONVEX)
def test_only_the_looser_bound_holds_elsewhere(name: str) -> None:
    """It is not enough that the squares, divided by the largest, are below the line from 1 to 0."""
    left, linear = left_by(TOPK, shuffled(NOT_CONVEX[name]), 0.1)
    assert linear**2 + 1e-3 < left <= linear + 1e-6


SHAPES_OF_TIME = {
    "constant": lambda rng, step: np.ones(60),
    "independent": lambda rng, step: rng.normal(size=60),
    "in a cycle": lambda rng, step: np.roll(np.arange(60.0), 7 * step),
    "one large": lambda rng, step: np.r_[100.0, rng.uniform(size=59)],
}
"""The gradients of a step."""


def farthest(kind: str, ratio: float, seed: int, *, feedback: bool) -> float:
    """How far what was sent ever is from what was given, in units of the bound."""
    reduce = SparseAllreduce(None, TopK(ratio, min_numel=0, warmup=None, residual=feedback))
    rng, behind, most, norms = np.random.default_rng(seed), np.zeros(60), 0.0, []
    for step in range(round(4 / ratio)):
        gradient = SHAPES_OF_TIME[kind](rng, step)
        behind += gradient - reduce({"p": gradient})["p"]
        norms.append(np.linalg.norm(gradient))
        most = max(most, float(np.linalg.norm(behind)))
        if feedback:
            assert np.linalg.norm(behind) == pytest.approx(reduce.stats().last.total.residual_norm, rel=1e-5, abs=1e-5)
    left = np.sqrt(1.0 - TopK(ratio).target_count(60) / 60)
    return most / float(left / (1.0 - left) * max(norms))


@given(kind=st.sampled_from([*SHAPES_OF_TIME]), ratio=st.floats(0.05, 0.9), seed=st.integers(0, 9))
def test_what_was_sent_is_never_far_from_what_was_given(kind: str, ratio: float, seed: int) -> None:
    assert farthest(kind, ratio, seed, feedback=True) <= 1.0 + 1e-5


def test_without_feedback_it_goes_away_from_it() -> None:
    assert farthest("constant", 0.1, 0, feedback=False) > 1.0


def distance(number: int, *, feedback: bool) -> float:
    """The squared distance from the optimum, per entry, of the mean of the last iterates. Each worker has another optimum."""
    rng, size, steps, noise = np.random.default_rng(2), 40, 120, 2.0
    own = 3.0 * rng.normal(size=(number, size))
    own -= own.mean(axis=0)
    workers = VirtualWorkers(number, TopK(0.1, min_numel=0, warmup=None, residual=feedback))
    iterate, mean = -np.ones(size), np.zeros(size)
    for step in range(steps):
        gradients = iterate + own + noise * rng.normal(size=(number, size))
        iterate = iterate - 0.05 * workers({"p": gradients})["p"]
        mean += iterate / (steps // 2) * (step >= steps // 2)
    return float(np.mean(mean**2))


@pytest.mark.parametrize(("feedback", "least", "most"), [(True, 8, 32), (False, 0, 2)])
def test_more_workers_come_as_much_closer_to_the_optimum(feedback: bool, least: float, most: float) -> None:
    """The noise of the gradients is divided by their number. With feedback nothing else keeps the mean away."""
    few, many = (distance(number, feedback=feedback) for number in (1, 16))
    assert least < few / many < most
