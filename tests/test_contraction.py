"""What a selection of the largest leaves of the squared norm: two bounds, and which gradients the tighter one holds for.

Of d entries with squares s_1 >= ... >= s_d the k largest leave at most 1 - k/d. They leave at most (1 - k/d)^2 if
s_i / (2 (d - i) + 1) does not increase with i, since (1 - k/d)^2 is what the k largest leave of 2 (d - i) + 1. Squares
that are convex in i and end at zero are of that kind (Gaussian-k, https://arxiv.org/abs/1911.08772, Theorem 1).
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from driver import make_pipeline, send
from hypothesis import given
from hypothesis import strategies as st
from table import COMPRESSORS, ORACLE, Row

from horovod_sparse.compressors.topk import TopK

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
    pipeline = make_pipeline(ORACLE, row.make(ratio), {"p": (gradient.size,)})
    before, indices, _ = send(ORACLE, pipeline, gradient)
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
