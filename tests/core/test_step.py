"""A step that does not succeed has never been: whatever ends it, what waits and what was learned are as before it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from horovod_sparse.compressors import DGC, MiCRO, RandomK, SIDCo, TopK
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.layout import Layout, Parameter, Slot
from horovod_sparse.exchange import protocols
from horovod_sparse.public import MomentumCorrection, Pairs, Union
from tests.harness.table import WITH_OPERATIONS, Backend, gradients_of, on_every_backend
from tests.harness.worker import Worker
from tests.harness.workers import (
    Reduced,
    end_step,
    exchange,
    exchange_all,
    make_workers,
    reduced_of,
    take_step,
    worker_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:horovod_sparse. rank .* the gradient of")
for_operations = pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
SHAPES = {"weight": (40, 30), "kernel": (500,), "head": (77,)}
"""The bucket of "weight" has a part of what waits; "kernel" and "head" share the other one."""
DENSE = "bias"
WORLD, SETTLED = 3, 3
BUCKET_BYTES = 4096


class Case(NamedTuple):
    make: Callable[..., Compressor]
    settings: dict[str, Any] = {}  # noqa: RUF012
    rates: tuple[float | None, float | None] = (None, None)
    """The learning rates: of the steps before, and of the one that fails."""
    scale: float = 1.0
    """The scale of the loss."""
    dtype: str = "float32"


class Dense(TopK):
    """Sends everything, as others do at the beginning of a warm-up."""

    def first_sparse_step(self, world: int) -> int:
        return 9


MOMENTUM = MomentumCorrection(0.5)
CASES = {
    "pairs": Case(TopK),
    "sidco": Case(SIDCo),
    "layer": Case(SIDCo, {"granularity": "layer"}),
    "momentum": Case(TopK, {"momentum": MOMENTUM}),
    "unmasked": Case(DGC, {"momentum": MomentumCorrection(0.5, masking=False)}),
    "clipped": Case(SIDCo, {"clip": 1.0}),
    "rates": Case(SIDCo, {"lr_in_residual": True}, (0.5, 0.1)),
    "rates-zero": Case(TopK, {"lr_in_residual": True, "momentum": MOMENTUM}, (0.5, 0.0)),
    "dense": Case(Dense),
    "dense-momentum": Case(Dense, {"momentum": MOMENTUM}),
    "union": Case(MiCRO),
    "union-momentum": Case(TopK, {"exchange": Union(), "momentum": MOMENTUM}),
    "shared": Case(RandomK),
    "packed": Case(TopK, {"exchange": Pairs("packed")}),
    "float64": Case(SIDCo, {"exchange": Pairs("packed")}, dtype="float64"),
    "scaled": Case(SIDCo, scale=4.0),
}


class Workers:
    """Several workers after some steps."""

    def __init__(self, backend: Backend, name: str) -> None:
        self.backend, self.case = backend, CASES[name]
        compressor = self.case.make(0.1, **{"warmup": None, "granularity": BUCKET_BYTES, **self.case.settings})
        self.workers: list[Worker] = make_workers(backend, compressor, SHAPES, WORLD, dtype=self.case.dtype)
        layout = Layout.of([Parameter(DENSE, (5,), self.case.dtype, "cpu")], is_dense=True)
        for worker in self.workers:
            worker.add_buckets([layout], lambda name: backend.array(np.zeros(1, np.float32)))
        for number in range(SETTLED):
            self.step(number, self.case.rates[0])

    def gradients(self, number: int, rank: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((number, rank))
        given = {
            name: rng.laplace(size=shape).astype(self.case.dtype) for name, shape in {**SHAPES, DENSE: (5,)}.items()
        }
        return {name: gradient * gradient.dtype.type(self.case.scale) for name, gradient in given.items()}

    def arrive(self, number: int, rate: float | None, bad: Mapping[int, str] | None = None) -> list[Any]:
        """Let all gradients of a step arrive. On some ranks one of them is not finite. Return them: nothing else has them."""
        everyone = []
        for rank, worker in enumerate(self.workers):
            given = self.gradients(number, rank)
            if bad and rank in bad:
                given[bad[rank]].flat[3] = np.nan
            mine = {name: self.backend.array(gradient) for name, gradient in given.items()}
            worker.start_step(self.case.scale)
            for name, gradient in mine.items():
                worker.arrive(name, gradient, rate)
            everyone.append(mine)
        return everyone

    def exchange(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            exchange(self.backend, self.workers, [worker.buckets[number] for worker in self.workers])

    def end(self) -> list[Reduced]:
        results: list[Reduced] = []
        for worker in self.workers:
            results.append({})
            worker.end_step(partial(self._write, results[-1]))
        return results

    def _write(self, result: Reduced, slots: Sequence[Slot], reduced: protocols.Reduced) -> None:
        result.update(reduced_of(self.backend, slots, reduced))

    def step(self, number: int, rate: float | None, bad: Mapping[int, str] | None = None) -> list[Reduced]:
        kept = self.arrive(number, rate, bad)
        self.exchange(range(len(self.workers[0].buckets)))
        assert kept
        return self.end()

    def held(self) -> list[dict[str, Any]]:
        """What every worker holds."""
        return [
            {
                **one.state_dict(),
                "counts": repr([(bucket.steps, bucket.last, bucket.sums) for bucket in one.buckets]),
            }
            for one in self.workers
        ]


def check_never_been(workers: Workers, before: Sequence[Mapping[str, Any]], name: str) -> None:
    """To rounding; with momentum, of which copies are kept, to the bit."""
    numpy, exact = workers.backend.numpy, "momentum" in workers.case.settings
    precision = np.finfo(workers.case.dtype).eps
    for rank, (now, was) in enumerate(zip(workers.held(), before, strict=True)):
        gradients = workers.gradients(SETTLED, rank)
        for part in ("residuals", "velocities"):
            assert now[part].keys() == was[part].keys()
            for one, array in was[part].items():
                old, new = numpy(array), numpy(now[part][one])
                near = 0.0 if exact else 2 * precision * (np.abs(old) + np.abs(gradients[one]))
                assert (np.abs(new - old) <= near).all(), (part, one)
        for what in ("adaptive", "counts"):
            assert now[what] == was[what], what
    if exact:
        other = Workers(workers.backend, name)
        rate = workers.case.rates[0]
        np.testing.assert_equal(workers.step(SETTLED + 1, rate), other.step(SETTLED + 1, rate))
    for number in (2, 3):
        for result in workers.step(SETTLED + number, workers.case.rates[0]):
            assert all(parts is not None for parts in result.values())


@for_operations
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rates[1] != 0.0])
@pytest.mark.parametrize(
    "bad", [{1: "weight"}, {0: "head", 2: "kernel"}, {2: DENSE}], ids=["one rank", "two ranks", "dense"]
)
def test_a_gradient_that_is_not_finite(backend: Backend, name: str, bad: dict[int, str]) -> None:
    """All ranks get NaN in its bucket, and what all others send is finite, but has never been."""
    workers = Workers(backend, name)
    before = workers.held()
    results = workers.step(SETTLED, workers.case.rates[1], bad)
    lost = {slot for one in bad.values() for slot in workers.workers[0].bucket_of[one].slots}
    for result in results:
        for one, parts in result.items():
            assert (parts is None) == (one in lost), one
    check_never_been(workers, before, name)


@for_operations
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("exchanged", [None, 0, 1], ids=["arrived", "begun", "exchanged in part"])
def test_a_step_that_is_given_up_alone(backend: Backend, name: str, exchanged: int | None) -> None:
    """`abort`, at different times."""
    workers = Workers(backend, name)
    before = workers.held()
    kept = workers.arrive(SETTLED, workers.case.rates[1])
    if exchanged is not None:
        workers.exchange(range(exchanged))
        for worker in workers.workers:
            for bucket in worker.buckets[exchanged:]:
                worker.sending(bucket).begin()
    for worker in workers.workers:
        worker.abort()
        assert worker.step is None
    assert kept
    check_never_been(workers, before, name)


@for_operations
def test_a_sum_that_overflows_stays_finite(backend: Backend) -> None:
    """Also when the gradient is taken out again."""
    (worker,) = make_workers(backend, TopK(0.01, warmup=None), {"p": (300,)}, 1)
    huge = np.linspace(0.5, 0.9, 300, dtype=np.float32) * np.finfo(np.float32).max
    results = []
    for _ in range(2):
        given = backend.array(huge)
        worker.arrive("p", given)
        exchange(backend, [worker], worker.buckets)
        worker.end_step(lambda slots, reduced: results.append(reduced.sent is None))
        assert np.isfinite(backend.numpy(worker.state_dict()["residuals"]["p"])).all()
    assert results == [False, True] and worker.steps == 1


@on_every_backend
def test_a_gradient_arrives_once_per_step(backend: Backend) -> None:
    """Whatever its bucket has reached, until the step has ended."""
    worker = worker_of(backend, TopK(0.1, granularity="layer", warmup=None))

    def arrives_twice() -> None:
        with pytest.raises(RuntimeError, match="'head'"):
            worker.arrive("head", None)

    for _ in range(2):
        bucket = worker.arrive("head", None)
        assert bucket is not None
        arrives_twice()
        message = bucket.begin().message
        arrives_twice()
        worker.advance(bucket, message)
        arrives_twice()
        end_step(worker)


def told(workers: list[Worker], bad: dict[int, list[str]], gone: int | None = None) -> Any:
    """What all ranks say at the end of a step: which gradients are not finite, and who gives it up."""
    said = [{"rank": rank, "given up": rank == gone, "bad": bad.get(rank, [])} for rank in range(len(workers))]

    def everyone(mine: Any) -> Any:
        assert mine == said[mine["rank"]]
        return said

    return everyone


@on_every_backend
def test_gradients_that_are_not_finite_are_warned_of_once_by_name_and_rank(backend: Backend) -> None:
    workers = make_workers(backend, TopK(0.1, granularity="layer", warmup=None), {"p": (300,), "q": (300,)}, workers=2)
    fine, bad = np.ones(300, np.float32), np.full(300, np.nan, np.float32)
    everyone = told(workers, {1: ["q"]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            given = [[backend.array(one) for one in arrays] for arrays in ((fine, fine), (fine, bad))]
            for worker, arrays in zip(workers, given, strict=True):
                for name, gradient in zip("pq", arrays, strict=True):
                    worker.arrive(name, gradient)
            exchange_all(backend, workers)
            assert [bool(worker.begun.bad()) for worker in workers] == [False, True]
            for worker in workers:
                worker.end_step(lambda *_: None, everyone)
    said = [str(one.message) for one in caught]
    assert len(said) == 2
    for rank, text in enumerate(said):
        assert f"rank {rank}: " in text and "'q' on rank 1" in text
    # Nobody else is asked: each tells what it knows.
    alone = make_workers(backend, TopK(0.1, warmup=None), {"q": (300,)}, workers=2)
    with (
        pytest.warns(UserWarning, match="rank 0: .* on another rank"),
        pytest.warns(UserWarning, match="rank 1: .*'q' on rank 1"),
    ):
        take_step(backend, alone, [{"q": fine}, {"q": bad}])


@on_every_backend
def test_who_gives_a_step_up_is_named_and_all_go_on(backend: Backend) -> None:
    """`spoil` may come when nothing has arrived yet, or something."""
    workers = make_workers(backend, MiCRO(0.1, granularity="layer", warmup=None), SHAPES, workers=3)
    given = [gradients_of(SHAPES, np.random.default_rng(rank)) for rank in range(3)]
    take_step(backend, workers, given)
    before = [worker.state_dict() for worker in workers]
    for has_arrived in (0, 2):
        kept = [{name: backend.array(one) for name, one in arrays.items()} for arrays in given]
        for rank, (worker, arrays) in enumerate(zip(workers, kept, strict=True)):
            for number, bucket in enumerate(worker.buckets):
                if rank != 1 or number < has_arrived:
                    worker.arrive(bucket.name, arrays[bucket.name])
                else:
                    assert worker.spoil(bucket) is worker.sending(bucket)
        exchange_all(backend, workers)
        everyone = told(workers, {}, gone=1)
        for rank, worker in enumerate(workers):
            if rank == 1:
                worker.end_step(lambda *_: pytest.fail("nothing is to be written"), everyone)
            else:
                with pytest.raises(RuntimeError, match=f"^rank {rank}: rank 1 "):
                    worker.end_step(lambda *_: pytest.fail("nothing is to be written"), everyone)
            assert worker.step is None
        for worker, was in zip(workers, before, strict=True):
            state = worker.state_dict()
            assert state["adaptive"] == was["adaptive"]
            for name, residual in was["residuals"].items():
                mine, theirs = backend.numpy(state["residuals"][name]), backend.numpy(residual)
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
    assert all(parts for result in take_step(backend, workers, given) for parts in result.values())
