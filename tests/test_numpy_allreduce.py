"""SparseAllreduce on one worker; several workers: parallel/policies.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from table import gradients

from horovod_sparse.numpy import DGC, MiCRO, NoOp, RandomK, SIDCo, SparseAllreduce, TopK

SHAPES = {"weight": (30, 40), "kernel": (500,), "bias": (7,)}


def local(step: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        name: gradients("laplace", int(np.prod(shape)), rng).reshape(shape).astype(dtype)
        for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize("make", [TopK, SIDCo, MiCRO, RandomK, lambda r: TopK(r, union=True)])
def test_what_is_sent_and_kept_is_what_was_given(make: Any) -> None:
    reduce = SparseAllreduce(None, make(0.1))
    given = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    sent = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(5):
        before = local(step)
        mine = {name: gradient.copy() for name, gradient in before.items()}
        for name, reduced in reduce(mine).items():
            assert reduced.shape == SHAPES[name] and reduced.dtype == np.float32
            given[name] += before[name]
            sent[name] += reduced
            np.testing.assert_array_equal(mine[name], before[name], err_msg="the caller's array was changed")
    kept = reduce.state_dict()["residuals"]
    assert set(kept) == {"weight", "kernel"}
    for name in SHAPES:
        np.testing.assert_allclose(sent[name] + kept.get(name, 0.0), given[name], rtol=1e-5, atol=1e-5)
    assert reduce.stats().steps == 5


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_types_are_kept(dtype: Any) -> None:
    reduce = SparseAllreduce(None, NoOp())
    for step in range(2):
        given = local(step, dtype)
        reduced = reduce(given)
        for name in SHAPES:
            # Values travel as float32; in a float64 residual the rest stays.
            np.testing.assert_allclose(reduced[name], given[name], rtol=1e-6 if dtype != np.float16 else 0)
            assert reduced[name].dtype == dtype


def test_a_saved_state_continues_identically() -> None:
    first = SparseAllreduce(None, DGC(0.05))
    for step in range(4):
        first(local(step))
    second = SparseAllreduce(None, DGC(0.05))
    second.load_state_dict(first.state_dict(), local(0))
    for step in range(4, 8):
        expected, got = first(local(step)), second(local(step))
        for name in SHAPES:
            np.testing.assert_array_equal(got[name], expected[name])
    second.reset()
    fresh = SparseAllreduce(None, DGC(0.05))
    np.testing.assert_array_equal(second(local(9))["weight"], fresh(local(9))["weight"])


def test_what_is_refused() -> None:
    compressor: Any = TopK
    with pytest.raises(TypeError, match="compression must be a compressor such as TopK"):
        SparseAllreduce(None, compressor)
    reduce = SparseAllreduce(None, TopK(0.1))
    assert reduce.stats().steps == 0
    with pytest.raises(TypeError, match=r"gradients\['weight'\] must be floating point, got int64"):
        reduce({"weight": np.ones(1000, int)})
    reduce(local(0))
    for other in ({"weight": np.ones(3)}, {**local(0), "bias": np.ones(8, np.float32)}, local(0, np.float64)):
        with pytest.raises(ValueError, match="gradients must be like those of the first call"):
            reduce(other)
    reduce(local(1))


@pytest.mark.parametrize("name", ["kernel", "bias"])
def test_not_finite_raises_and_the_next_step_works(name: str) -> None:
    reduce = SparseAllreduce(None, TopK(0.1))
    bad = local(0)
    bad[name][2] = np.nan
    with pytest.raises(FloatingPointError, match=f"rank 0: the gradient of parameter '{name}' holds NaN"):
        reduce(bad)
    assert all(np.isfinite(reduced).all() for reduced in reduce(local(1)).values())


def test_not_finite_propagates() -> None:
    reduce = SparseAllreduce(None, TopK(0.1, not_finite="propagate"))
    bad = local(0)
    bad["kernel"][2] = np.inf
    reduced = reduce(bad)
    assert np.isnan(reduced["kernel"]).all()
    assert np.isfinite(reduce(local(1))["kernel"]).all()


def test_small_arrays_are_clipped_too() -> None:
    reduced = SparseAllreduce(None, NoOp(clip_norm=2.0))({"bias": np.array([3.0, 4.0]), "weight": np.full(400, 1.0)})
    np.testing.assert_allclose(reduced["bias"], [1.2, 1.6])
    np.testing.assert_allclose(np.linalg.norm(reduced["weight"]), 2.0, rtol=1e-6)


def test_a_learning_rate_is_asked_for() -> None:
    with pytest.raises(ValueError, match="learning_rate must be given with lr_in_residual=True"):
        SparseAllreduce(None, TopK(0.1, lr_in_residual=True))(local(0))
