"""The state goes from one framework to the other."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from driver import make_pipeline, send
from table import BACKENDS, COMPRESSORS, Backend, Row, gradients

from horovod_sparse.core.state import empty_state, holds_anything, rescale_state

PAIRS = list(itertools.permutations(BACKENDS, 2))
ROWS = [row for row in COMPRESSORS if row.name in ("dgc", "sidco-gamma-robust", "micro")]
"""With velocities, an adaptive state with lists, and a threshold; `test_backends` sees that all save the same, for all."""


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda backend: str(backend))
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_another_framework_goes_on_where_one_stopped(source: Backend, target: Backend, row: Row) -> None:
    rng = np.random.default_rng(0)
    one = make_pipeline(source, row.make(0.05), {"p": (20, 30)})
    other = make_pipeline(target, row.make(0.05), {"p": (20, 30)})
    for _ in range(3):
        send(source, one, gradients("laplace", 600, rng).reshape(20, 30))
    send(target, other, gradients("laplace", 600, rng).reshape(20, 30))
    other.load_state_dict(one.state_dict())
    for _ in range(3):
        gradient = gradients("laplace", 600, rng).reshape(20, 30)
        expected, got = send(source, one, gradient), send(target, other, gradient)
        np.testing.assert_array_equal(got.before, expected.before)
        np.testing.assert_array_equal(got.indices, expected.indices)
        np.testing.assert_array_equal(got.values, expected.values)


RESCALED = [row for row in COMPRESSORS if row.name in ("sidco-gamma-robust", "micro", "threshold", "topk", "dgc")]


@pytest.mark.parametrize("row", RESCALED, ids=str)
def test_a_state_that_waits_is_rescaled_as_one_that_is_used(row: Row) -> None:
    backend, rng = BACKENDS[0], np.random.default_rng(0)
    one, other = (make_pipeline(backend, row.make(0.05), {"p": (600,)}) for _ in range(2))
    for _ in range(3):
        send(backend, one, gradients("laplace", 600, rng))
    other.load_state_dict(rescale_state(one.state_dict(), row.make(0.05), 0.25))
    one.rescale(0.25)
    assert repr(other.state_dict()) == repr(one.state_dict())
    for _ in range(3):
        gradient = gradients("laplace", 600, rng)
        expected, got = send(backend, one, gradient), send(backend, other, gradient)
        np.testing.assert_array_equal(got.indices, expected.indices)
        np.testing.assert_array_equal(got.values, expected.values)


def test_a_state_holds_something_if_there_is_one_array() -> None:
    array: dict[str, Any] = {"p": np.zeros(3, np.float32)}
    for part in ("residuals", "velocities"):
        assert holds_anything({**empty_state(), part: array})
    assert not holds_anything(empty_state())
