"""VirtualWorkers: bit for bit what a `SparseAllreduce` on each worker comes to."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from horovod_sparse import kernels
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.exchange.protocols import Exchange
from horovod_sparse.numpy import (
    MomentumCorrection,
    Pairs,
    SIDCo,
    SparseAllreduce,
    TopK,
    Union,
    VirtualWorkers,
)
from tests.harness.table import COMPRESSORS, Row
from tests.harness.virtual_mpi import Comm, run

WORLD = 4
SHAPES = {"weight": (30, 20), "kernel": (300,), "bias": (7,), "scale": ()}
EXCHANGES = (Pairs("packed"), Union())
"""All that can be chosen, beside those that a compressor has by default."""


def gradients(step: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Those of all workers; one of them is not finite in a step."""
    rng = np.random.default_rng(step)
    drawn = {name: rng.laplace(size=(WORLD, *shape)).astype(dtype) for name, shape in SHAPES.items()}
    if step == 4:
        drawn["kernel"][2, 5] = np.nan
    return drawn


def settings_of(row: Row) -> Iterator[dict[str, Any]]:
    yield {}
    for exchange in EXCHANGES:
        if exchange.needs in row.cls.chooses and "exchange" not in row.settings:
            yield {"exchange": exchange}


ROWS = [(row, settings) for row in COMPRESSORS for settings in settings_of(row)]


def outcome(reduce: Any, given: dict[str, np.ndarray], rate: float) -> Any:
    return {name: one.tobytes() for name, one in reduce(given, learning_rate=rate).items()}


def plain(value: Any) -> Any:
    """A state or a result in which arrays are their bits."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return (value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else repr(value)


def check_alike(compressor: Compressor, dtype: Any = np.float32, *, average: bool = True, steps: int = 9) -> list[Any]:
    """Both ways do the same, in every step and on every worker. Return the outcomes of the steps."""

    def work(comm: Comm) -> Any:
        reduce, rank = SparseAllreduce(comm, compressor, average=average), comm.Get_rank()
        mine = [{name: one[rank] for name, one in gradients(step, dtype).items()} for step in range(steps)]
        outcomes = [outcome(reduce, one, 0.1 + step) for step, one in enumerate(mine)]
        return outcomes, plain(reduce.state_dict()), repr(reduce.stats())

    apart = run(WORLD, work)
    together = VirtualWorkers(WORLD, compressor, average=average)
    outcomes = [outcome(together, gradients(step, dtype), 0.1 + step) for step in range(steps)]
    for worker, expected in enumerate(apart):
        got = outcomes, plain({**together.feedbacks[worker].state_dict(), "sparse": []}), repr(together.stats(worker))
        assert got == expected, f"worker {worker}"
    return outcomes


@pytest.mark.filterwarnings("ignore:horovod_sparse. rank .* (more entries|the gradient of)")
@pytest.mark.parametrize(("row", "settings"), ROWS, ids=str)
def test_all_workers_in_one_process_do_what_they_do_apart(row: Row, settings: dict[str, Any]) -> None:
    """The first steps are dense, then ratios come down, and one step fails."""
    outcomes = check_alike(row.make(0.1, warmup=2.0, **settings))
    bad = [bool(np.isnan(np.frombuffer(one["kernel"], np.float32)).all()) for one in outcomes]
    assert bad == [step == 4 for step in range(9)]


@pytest.mark.filterwarnings("ignore:horovod_sparse. rank .* the gradient of")
@pytest.mark.parametrize("exchange", [None, *EXCHANGES], ids=repr)
def test_other_types_units_and_sums(exchange: Exchange | None) -> None:
    chosen: Any = {"exchange": exchange, "granularity": "layer", "min_numel": 0, "warmup": None}
    check_alike(TopK(0.1, lr_in_residual=True, momentum=MomentumCorrection(0.9), **chosen), np.float64, average=False)


def test_the_worker_with_the_bad_gradient_is_named() -> None:
    workers = VirtualWorkers(WORLD, TopK(0.1, warmup=None))
    with pytest.warns(UserWarning, match="rank 2: .*'kernel' on rank 2") as caught:
        reduced = workers(gradients(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        workers(gradients(4))
    assert len(caught) == 1 and np.isnan(reduced["kernel"]).all() and workers.stats().steps == 0


def test_an_error_within_a_step_gives_it_up_on_all_workers() -> None:
    first, second = (VirtualWorkers(WORLD, TopK(0.1, lr_in_residual=True, warmup=None)) for _ in range(2))
    with pytest.raises(ValueError, match="learning_rate must be given with lr_in_residual=True"):
        first(gradients(0))
    assert outcome(first, gradients(1), 0.1) == outcome(second, gradients(1), 0.1)


def test_reset_begins_again() -> None:
    workers = VirtualWorkers(WORLD, SIDCo(0.1, warmup=None))
    assert workers.stats().steps == 0
    runs = []
    for _ in range(2):
        runs.append([outcome(workers, gradients(step), 0.1) for step in range(4)])
        assert workers.stats(3).steps == 4
        workers.reset()
    assert runs[0] == runs[1]


def test_what_concerns_all_workers_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "horovod_sparse")
    workers = VirtualWorkers(WORLD, SIDCo(0.5, slack=1.0, stages=1, adapt="paper", warmup=None, min_numel=0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(110):
            workers({"w": np.random.default_rng(step).normal(size=(WORLD, 300)).astype(np.float32)})
    assert [str(one.message)[:15] for one in caught] == ["horovod_sparse:"]
    start, dense = caplog.messages
    assert start == f"SIDCo 0.5: 1 buckets, 300 entries, 0 parameters dense, kernels {kernels.variant()}"
    assert re.search(r"SIDCo\(ratio=0\.5.* 4 workers .* 2\.0 times", dense)


def test_what_is_refused() -> None:
    compressor: Any = TopK
    with pytest.raises(TypeError, match=r"compression must be .*horovod_sparse\.numpy.* TopK\("):
        VirtualWorkers(2, compressor)
    for number in (0, 2.0):
        with pytest.raises((ValueError, TypeError), match=f"number must be .*>= 1, got {number}"):
            VirtualWorkers(number, TopK(0.1))  # type: ignore[arg-type]
    workers = VirtualWorkers(2, TopK(0.1))
    for shape in ((3, 4), ()):
        with pytest.raises(
            ValueError, match=rf"gradients\['w'\] must have .* 2 workers .* {re.escape(str(shape))}; np\.stack"
        ):
            workers({"w": np.ones(shape)})
    with pytest.raises(TypeError, match=r"gradients\['w'\] must be floating point.* int64"):
        workers({"w": np.ones((2, 300), int)})
    workers({"w": np.ones((2, 300))})
    with pytest.raises(ValueError, match=r"gradients must .*'w': .*2, 300\).*, got .*'w': .*2, 301\)"):
        workers({"w": np.ones((2, 301))})
