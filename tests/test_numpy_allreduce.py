"""SparseAllreduce on one worker; several workers: parallel/policies.py."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
from table import gradients_of
from virtual_mpi import Comm, run

from horovod_sparse import kernels
from horovod_sparse.exchange.protocols import Exchange
from horovod_sparse.numpy import (
    DGC,
    Clip,
    MiCRO,
    NoOp,
    Pairs,
    RandomK,
    SIDCo,
    SparseAllreduce,
    TopK,
    Union,
)

SHAPES = {"weight": (30, 40), "kernel": (500,), "bias": (7,)}


def local(step: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    drawn = gradients_of(SHAPES, np.random.default_rng(step))
    return {name: gradient.astype(dtype) for name, gradient in drawn.items()}


def test_the_first_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "horovod_sparse")
    reduce = SparseAllreduce(None, TopK(0.1, granularity="layer", warmup=None))
    for step in range(2):
        reduce(local(step))
    assert caplog.messages == [f"TopK 0.1: 2 buckets, 1700 entries, 1 parameters dense, kernels {kernels.variant()}"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_types_are_kept(dtype: Any) -> None:
    reduce = SparseAllreduce(None, NoOp())
    for step in range(2):
        given, kept = local(step, dtype), local(step, dtype)
        reduced = reduce(given)
        for name in SHAPES:
            np.testing.assert_array_equal(given[name], kept[name], err_msg="the caller's array was changed")
            # Values travel as float32; in a float64 residual the rest stays.
            np.testing.assert_allclose(reduced[name], given[name], rtol=1e-6)
            assert reduced[name].dtype == dtype


def test_what_is_refused() -> None:
    compressor: Any = TopK
    with pytest.raises(TypeError, match="compression must be a compressor such as TopK"):
        SparseAllreduce(None, compressor)
    with pytest.raises(ValueError, match="updates must be 'auto' or False with NumPy, got True"):
        SparseAllreduce(None, TopK(0.1, updates=True))
    reduce = SparseAllreduce(None, TopK(0.1, warmup=None))
    assert reduce.stats().steps == 0
    for dtype in (np.int64, np.float16, np.complex128, np.longdouble):
        message = rf"gradients\['weight'\] must be floating point, .* got {np.dtype(dtype)}"
        with pytest.raises(TypeError, match=message):
            reduce({"weight": np.ones(1000, dtype)})
    listed: Any = [np.ones(1000, np.float32)]
    with pytest.raises(TypeError, match=r"gradients must be a mapping of names to arrays, .* got list"):
        reduce(listed)
    state = SparseAllreduce(None, TopK(0.1, warmup=None)).state_dict()
    with pytest.raises(TypeError, match="gradients must be given before the first call"):
        reduce.load_state_dict(state)
    with pytest.raises(TypeError, match=r"gradients must be a mapping of names to arrays, .* got list"):
        reduce.load_state_dict(state, listed)
    reduce(local(0))
    for other in ({"weight": np.ones(3)}, {**local(0), "bias": np.ones(8, np.float32)}, local(0, np.float64)):
        with pytest.raises(ValueError, match="gradients must be like those of the first call"):
            reduce(other)
    reduce(local(1))


@pytest.mark.parametrize(("clip", "norms"), [(2.0, (5, 20)), (Clip(2.0, "model"), (425**0.5, 425**0.5))])
def test_small_arrays_are_clipped_too(clip: Any, norms: tuple[float, float]) -> None:
    given = {"bias": np.array([3.0, 4.0]), "weight": np.full(400, 1.0)}
    reduced = SparseAllreduce(None, NoOp(clip=clip))(given)
    for (name, gradient), norm in zip(given.items(), norms, strict=True):
        np.testing.assert_allclose(reduced[name], gradient * 2 / norm, rtol=1e-6)


class Interruption(BaseException):
    """As KeyboardInterrupt, which would end the tests."""


def test_a_state_that_is_refused_before_the_first_call_fixes_nothing() -> None:
    """Not even names and shapes. Later: `test_pipeline`."""
    source = SparseAllreduce(None, DGC(0.05, warmup=None))
    source(local(0))
    good = source.state_dict()
    reduce, other = (SparseAllreduce(None, DGC(0.05, warmup=None)) for _ in range(2))
    for bad in ({**good, "adaptive": None}, {**good, "velocities": {}}):
        with pytest.raises(ValueError, match=r"state|velocities"):
            reduce.load_state_dict(bad, local(0))
    given = {"another": np.arange(2000.0)}
    np.testing.assert_array_equal(reduce(given)["another"], other(given)["another"])


@pytest.mark.parametrize(
    ("rates", "wrong"),
    [((), np.nan), ((), np.inf), ((), -0.1), ((0.1,), 1e-310), ((0.1,), 1e39), ((1.0,), 2e-39)],
    ids=["NaN", "infinity", "negative", "tiny", "huge", "beyond float32"],
)
def test_a_learning_rate_that_is_no_unit_is_refused_and_changes_nothing(rates: tuple[float, ...], wrong: float) -> None:
    reduce, other = (SparseAllreduce(None, SIDCo(0.1, lr_in_residual=True, warmup=None)) for _ in range(2))
    for one in (reduce, other):
        for step, rate in enumerate(rates):
            one(local(step), learning_rate=rate)
    with pytest.raises(
        ValueError, match=rf"learning rate of parameter 'bias' must be 0, or .* got {re.escape(repr(wrong))}"
    ):
        reduce(local(7), learning_rate=wrong)
    right = rates[-1] if rates else 0.1
    for step in range(8, 10):
        mine, theirs = (one(local(step), learning_rate=np.float64(right)) for one in (reduce, other))
        for name in SHAPES:
            np.testing.assert_array_equal(mine[name], theirs[name])
    assert {type(rate) for rate in reduce.state_dict()["learning_rates"].values()} == {float}


# --- several workers ---


def of_rank(step: int, rank: int) -> dict[str, np.ndarray]:
    return local(10 * step + rank)


def stopped(reduce: SparseAllreduce, step: int, rank: int, at: str) -> None:
    """A call that is interrupted when a method of the pipeline, or of its first bucket, is called."""
    owner = reduce.pipeline.buckets[0] if at == "begin" else reduce.pipeline
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, at, interrupted)
        with pytest.raises(Interruption):
            reduce(of_rank(step, rank))


def interrupted(*_: Any) -> None:
    raise Interruption


MAKERS = {
    "pairs": lambda: TopK(0.1, warmup=None),
    "layer": lambda: SIDCo(0.1, granularity="layer", warmup=None),
    "union": lambda: MiCRO(0.1, warmup=None),
    "shared": lambda: RandomK(0.1, warmup=None),
}


@pytest.mark.parametrize("exchange", [Union(), Pairs("packed")], ids=repr)
def test_workers_that_differ_in_their_exchange_are_told(exchange: Exchange) -> None:
    def work(comm: Comm) -> None:
        mine: Any = exchange if comm.Get_rank() == 0 else None
        reduce = SparseAllreduce(comm, TopK(0.1, exchange=mine, warmup=None))
        for _ in range(2):
            with pytest.raises(ValueError, match=r"worker \d of its group differs \(mine, theirs\): {'compression': "):
                reduce(local(0))

    assert run(2, work) == [None, None]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("before", [True, False], ids=["before it ends", "when it has ended"])
def test_a_call_that_raises_on_one_worker_alone_is_noticed(name: str, before: bool) -> None:
    """Its result is lost there, and the other has it."""

    def work(comm: Comm) -> dict[str, np.ndarray]:
        rank = comm.Get_rank()
        reduce = SparseAllreduce(comm, MAKERS[name]())
        reduce(of_rank(0, rank))
        saved = reduce.state_dict()
        if rank == 0:
            reduce(of_rank(1, rank))
        elif before:
            stopped(reduce, 1, rank, "end_step")
        else:
            end = reduce.pipeline.end_step

            def end_interrupted() -> None:
                end()
                interrupted()

            reduce.pipeline.end_step = end_interrupted  # type: ignore[method-assign]
            with pytest.raises(Interruption):
                reduce(of_rank(1, rank))
            reduce.pipeline.end_step = end  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match=r"must have returned on all workers, but has raised on \[1\] alone"):
            reduce(of_rank(2, rank))
        reduce.load_state_dict(saved)
        return reduce(of_rank(3, rank))

    check_alike(run(2, work))


@pytest.mark.parametrize(
    ("stops", "names"),
    [
        ({1: "arrive"}, [*MAKERS]),
        ({1: "begin"}, [*MAKERS]),
        ({1: "complete"}, ["union"]),
        ({1: "advance"}, ["union"]),
        # Some of their collectives were started on one worker alone.
        ({0: "begin", 1: "complete", 2: "begin"}, [*MAKERS]),
    ],
)
def test_no_worker_waits_for_those_that_have_raised_within_a_step(stops: dict[int, str], names: list[str]) -> None:
    """In exchanges of one round all collectives are under way before the first result is used, so the others get theirs."""

    def work(comm: Comm, name: str) -> dict[str, np.ndarray]:
        rank = comm.Get_rank()
        reduce = SparseAllreduce(comm, MAKERS[name]())
        reduce(of_rank(0, rank))
        if rank in stops:
            stopped(reduce, 1, rank, stops[rank])
        else:
            with pytest.raises(RuntimeError, match=f"rank {rank}: another worker has raised within this step"):
                reduce(of_rank(1, rank))
        return reduce(of_rank(2, rank))

    for name in names:
        check_alike(run(3, partial(work, name=name)))


def check_alike(outcomes: list[Any]) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, dict), outcomes
        for name in SHAPES:
            np.testing.assert_array_equal(outcome[name], outcomes[0][name])
