"""SparseAllreduce on one worker; several workers: parallel/policies.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from horovod_sparse import kernels
from horovod_sparse.core.sending import Sending
from horovod_sparse.exchange.protocols import Collective, Exchange
from horovod_sparse.numpy import (
    DGC,
    MiCRO,
    NoOp,
    Pairs,
    RandomK,
    SIDCo,
    SparseAllreduce,
    TopK,
    Union,
)
from horovod_sparse.numpy.transport import Communicator
from tests.harness.table import gradients_of
from tests.harness.virtual_mpi import Comm, run

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
    with pytest.raises(TypeError, match=r"compression must be .*horovod_sparse\.numpy.* TopK\("):
        SparseAllreduce(None, compressor)
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
    with pytest.raises(TypeError, match=r"gradients must be given .*, got None: load_state_dict\(state, "):
        reduce.load_state_dict(state)
    with pytest.raises(TypeError, match=r"gradients must be a mapping of names to arrays, .* got list"):
        reduce.load_state_dict(state, listed)
    reduce(local(0))
    for other in ({"weight": np.ones(3)}, {**local(0), "bias": np.ones(8, np.float32)}, local(0, np.float64)):
        with pytest.raises(ValueError, match=r"gradients must .*, got {'weight': \(\("):
            reduce(other)
    reduce(local(1))


def test_every_array_is_clipped_by_its_own_norm_small_ones_too() -> None:
    given = {"bias": np.array([3.0, 4.0]), "weight": np.full(400, 1.0)}
    reduced = SparseAllreduce(None, NoOp(clip=2.0))(given)
    for (name, gradient), norm in zip(given.items(), (5, 20), strict=True):
        np.testing.assert_allclose(reduced[name], gradient * 2 / norm, rtol=1e-6)


def test_a_state_that_is_refused_before_the_first_call_fixes_nothing() -> None:
    """Not even names and shapes. Later: `tests/core/test_feedback.py`."""
    source = SparseAllreduce(None, DGC(0.05, momentum=0.9, warmup=None))
    source(local(0))
    good = source.state_dict()
    reduce, other = (SparseAllreduce(None, DGC(0.05, momentum=0.9, warmup=None)) for _ in range(2))
    for bad, named in (
        ({**good, "adaptive": None}, r"state\['adaptive'\]"),
        ({**good, "velocities": {}}, "velocities"),
    ):
        with pytest.raises(ValueError, match=f"{named} must be"):
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


# --- several workers ---


def of_rank(step: int, rank: int) -> dict[str, np.ndarray]:
    return local(10 * step + rank)


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
            with pytest.raises(ValueError, match=r"worker \d .*'compression': .*exchange="):
                reduce(local(0))

    assert run(2, work) == [None, None]


WRONG: dict[str, tuple[type[Exception], str, Callable[[dict[str, np.ndarray]], Any]]] = {
    "shape": (ValueError, "gradients", lambda given: {**given, "bias": np.ones(8, np.float32)}),
    "names": (ValueError, "gradients", lambda given: {"weight": given["weight"]}),
    "type": (TypeError, r"gradients\['kernel'\]", lambda given: {**given, "kernel": np.ones(500, np.int64)}),
    "mapping": (TypeError, "gradients", lambda given: [*given.values()]),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("error", "named", "spoil"), WRONG.values(), ids=WRONG)
def test_a_call_that_raises_on_some_workers_raises_on_all_which_go_on(
    name: str, error: type[Exception], named: str, spoil: Callable[[dict[str, np.ndarray]], Any]
) -> None:
    """The others are told who it is. Nothing of the call is left on any."""

    def work(comm: Comm, wrong: tuple[int, ...]) -> dict[str, np.ndarray]:
        rank = comm.Get_rank()
        reduce = SparseAllreduce(comm, MAKERS[name]())
        reduce(of_rank(0, rank))
        before = reduce.state_dict()
        if rank in wrong:
            with pytest.raises(error, match=f"^{named} must be"):
                reduce(spoil(of_rank(1, rank)))
        else:
            with pytest.raises(RuntimeError, match=f"^rank {rank}: rank {wrong[0]} "):
                reduce(of_rank(1, rank))
        after = reduce.state_dict()
        assert after["adaptive"] == before["adaptive"] and reduce.steps == 1
        for one, residual in before["residuals"].items():
            np.testing.assert_allclose(after["residuals"][one], residual, rtol=0, atol=2e-6)
        return reduce(of_rank(2, rank))

    for wrong in ((1,), (0, 2)):
        check_alike(run(3, partial(work, wrong=wrong)))


def test_a_learning_rate_that_is_refused_on_one_worker_gives_the_step_up_on_all() -> None:
    """Some of its buckets are under way then."""

    def work(comm: Comm) -> dict[str, np.ndarray]:
        rank = comm.Get_rank()
        reduce = SparseAllreduce(comm, SIDCo(0.1, lr_in_residual=True, granularity="layer", warmup=None))
        reduce(of_rank(0, rank), learning_rate=0.1)
        error, text = (RuntimeError, "rank 0 ") if rank else (ValueError, "learning rate of parameter .* got nan")
        with pytest.raises(error, match=text):
            reduce(of_rank(1, rank), learning_rate=0.1 if rank else np.nan)
        return reduce(of_rank(2, rank), learning_rate=0.1)

    check_alike(run(3, work))


@pytest.mark.parametrize("name", MAKERS)
def test_a_gradient_that_is_not_finite_comes_out_as_nan_on_all_workers(name: str) -> None:
    def work(comm: Comm) -> dict[str, np.ndarray]:
        rank = comm.Get_rank()
        reduce = SparseAllreduce(comm, MAKERS[name]())
        reduce(of_rank(0, rank))
        given = of_rank(1, rank)
        if rank == 1:
            given["kernel"][3] = np.nan
        reduced = reduce(given)
        assert np.isnan(reduced["kernel"]).all() and np.isfinite(reduced["bias"]).all() and reduce.steps == 1
        return reduce(of_rank(2, rank))

    with pytest.warns(UserWarning, match="'kernel' on rank 1"):
        check_alike(run(3, work))


@pytest.mark.parametrize("go_on", ["load_state_dict", "reset"])
def test_after_an_exception_within_an_exchange_a_worker_refuses_to_go_on(
    go_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has another state: nobody knows what the others have."""
    reduce, other = (SparseAllreduce(None, MiCRO(0.1, warmup=None)) for _ in range(2))
    for one in (reduce, other):
        one(local(0))
    saved = reduce.state_dict()
    with monkeypatch.context() as patched:
        patched.setattr(Sending, "advance", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            reduce(local(1))
    assert reduce.driver.feedback is not None and reduce.driver.feedback.is_broken
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"compression\.reset\(\)"):
            reduce(local(1))
    for one in (reduce, other):
        one.load_state_dict(saved) if go_on == "load_state_dict" else one.reset()
    check_alike([reduce(local(2)), other(local(2))])


def test_collectives_of_a_communicator() -> None:
    """Matched by their order, also where a worker has nothing to send. Values are told whatever their lengths are."""

    def work(comm: Comm) -> Any:
        communicator, rank = Communicator(comm), comm.Get_rank()
        assert (communicator.world, communicator.position, communicator.rank) == (3, rank, rank)
        gathered = communicator.start(Collective("allgather", np.full((2, 2), rank, np.int32)))
        summed = communicator.start(Collective("allreduce", np.arange(4.0)[::2] + rank))
        nothing = communicator.start(Collective("allgather", np.zeros((0, 2), np.int32)))
        everyone = communicator.everyone({"rank": rank, "text": "ä" * 10**rank})
        assert nothing().shape == (0, 2)
        return summed().tolist(), gathered()[:, 0].tolist(), [(one["rank"], len(one["text"])) for one in everyone]

    assert run(3, work) == 3 * [([3.0, 9.0], [0, 0, 1, 1, 2, 2], [(0, 1), (1, 10), (2, 100)])]
    alone = Communicator(None)
    assert (alone.world, alone.position, alone.rank, alone.everyone([1])) == (1, 0, 0, [[1]])


def check_alike(outcomes: list[Any]) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, dict), outcomes
        for name in SHAPES:
            np.testing.assert_array_equal(outcome[name], outcomes[0][name])
