"""Every backend does what the oracle does, to the last bit; so the laws that hold for the oracle (`test_laws`) hold for all.

A `Case` says what the workers are given. `observe` carries it out on one backend and returns all that can be seen of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tests.harness.stairs import Halving
from tests.harness.table import (
    BACKENDS,
    COMPRESSORS,
    DEGENERATE,
    KINDS,
    ODD,
    ORACLE,
    Backend,
    Row,
    gradients,
    gradients_of,
)
from tests.harness.worker import Worker
from tests.harness.workers import end_step, exchange, make_workers

OTHERS = [backend for backend in BACKENDS if backend is not ORACLE]
Given = list[dict[str, np.ndarray | None]]
"""A step's gradients: of each worker, by parameter."""
Seen = list[tuple[str, Any]]
"""What was seen, in its order: what it is, and the array, number or text."""


@dataclass(frozen=True)
class Case:
    """What some workers are given, step by step."""

    steps: list[Given]
    ratio: Any = 0.1
    settings: Mapping[str, Any] = field(default_factory=dict)
    residual_dtype: str = "float32"
    saved_after: int | None = None
    """Then new workers take over what the first ones saved."""
    rates: tuple[float, ...] = ()
    """Learning rates of the steps, for `lr_in_residual`."""
    given_up: int | None = None
    """The step that is given up when one bucket has been exchanged, and the exchange of the others has begun."""


def observe(backend: Backend, row: Row, case: Case) -> Seen:
    """Carry out a case."""
    first: Mapping[str, Any] = case.steps[0][0]
    shapes = {name: np.shape(gradient) for name, gradient in first.items()}
    world = len(case.steps[0])

    def make() -> list[Worker]:
        compressor = row.make(case.ratio, **case.settings)
        return make_workers(backend, compressor, shapes, world, dtype=case.residual_dtype)

    workers = make()
    seen: Seen = []
    for number, given_now in enumerate(case.steps):
        if number == case.saved_after:
            states, workers = [worker.state_dict() for worker in workers], make()
            for worker, state in zip(workers, states, strict=True):
                worker.load_state_dict(state)
        rate = case.rates[number] if case.rates else None
        for worker, of_worker in zip(workers, given_now, strict=True):
            worker.start_step()
            for name, gradient in of_worker.items():
                given = None if gradient is None else backend.array(gradient)
                worker.arrive(name, given, rate)
                assert gradient is None or np.array_equal(backend.numpy(given), gradient, equal_nan=True)
        seen += _kept(backend, workers, f"step {number}, before the exchange")
        for count, buckets in enumerate(zip(*(worker.buckets for worker in workers), strict=True)):
            if number == case.given_up and count:
                for worker, bucket in zip(workers, buckets, strict=True):
                    worker.sending(bucket).begin()
                continue
            for rank, reduced in enumerate(exchange(backend, workers, buckets, divisor=float(world))):
                for name, parts in reduced.items():
                    what = f"step {number}, {name!r} as rank {rank} gets it"
                    seen.append((what, None if parts is None else len(parts)))
                    seen += [(what, array) for part in parts or () for array in part]
        for worker in workers:
            if number == case.given_up:
                worker.abort()
            else:
                end_step(worker)
        seen += _kept(backend, workers, f"step {number}, at its end")
    for rank, worker in enumerate(workers):
        state = worker.state_dict()
        seen += [
            (f"{part}[{name!r}] saved by rank {rank}", backend.numpy(array))
            for part in ("residuals", "velocities")
            for name, array in state[part].items()
        ]
        seen += [(f"adaptive[{name!r}] saved by rank {rank}", it) for name, it in state["adaptive"].items()]
        total = worker.stats().last.total
        seen.append((f"statistics of rank {rank}", (total.target, total.count, total.truncated, total.bytes_sent)))
    return seen


def _kept(backend: Backend, workers: list[Worker], when: str) -> Iterator[tuple[str, np.ndarray]]:
    for rank, worker in enumerate(workers):
        for bucket in worker.buckets:
            for what, array in (("residual", bucket.buffer), ("velocity", bucket.velocity)):
                if array is not None:
                    yield f"{when}: {what} of {bucket.name!r} on rank {rank}", backend.numpy(array).copy()


def assert_same(got: Seen, expected: Seen) -> None:
    """The same, bit for bit; only estimated numbers, which are sums of many, may be rounded differently."""
    assert [what for what, _ in got] == [what for what, _ in expected]
    for (what, mine), (_, theirs) in zip(got, expected, strict=True):
        if isinstance(theirs, np.ndarray):
            # The bytes first: to compare arrays takes many times longer.
            if (mine.dtype, mine.shape, mine.tobytes()) != (theirs.dtype, theirs.shape, theirs.tobytes()):
                np.testing.assert_array_equal(mine, theirs, strict=True, err_msg=what)
                raise AssertionError(f"{what}: the sign of a zero or the bits of a NaN differ")
        elif isinstance(theirs, dict):
            assert mine.keys() == theirs.keys(), what
            for name, value in theirs.items():
                assert type(mine[name]) is type(value), f"{what}: {name}"
                number = isinstance(value, float)
                assert mine[name] == (pytest.approx(value, rel=1e-9, nan_ok=True) if number else value), (
                    f"{what}: {name}"
                )
        else:
            assert mine == theirs, what


def alone(steps: list[np.ndarray], **chosen: Any) -> Case:
    """One worker with one parameter."""
    return Case([[{"p": gradient}] for gradient in steps], **chosen)


SHAPES = {"a": (40, 30), "b": (17,), "c": (900,), "d": (1,)}
"""Of two buckets of 4096 bytes."""


def _several(world: int, steps: int, rng: np.random.Generator) -> list[Given]:
    return [[gradients_of(SHAPES, rng) for _ in range(world)] for _ in range(steps)]


def _degenerate(row: Row) -> Iterator[Case]:
    for gradient in DEGENERATE.values():
        for ratio in (1.0, 0.3, 0.01):
            yield alone([gradient] + 4 * [gradient * np.float32(0.01)], ratio=ratio)


def _kinds(row: Row) -> Iterator[Case]:
    rng = np.random.default_rng(10)
    for kind in KINDS:
        for ratio in row.ratios:
            yield alone([gradients(kind, 5000, rng) for _ in range(8)], ratio=ratio)
            for scale in (-(2.0**-40), 2.0**40):
                yield alone([gradients(kind, 3000, rng) * np.float32(scale) for _ in range(2)], ratio=ratio)
    for kind in ODD:
        yield alone([gradients(kind, 20_000, rng) for _ in range(4)], ratio=row.ratios[-1])
    # More than the kernels and the operations take at once.
    yield alone([gradients("laplace", 70_001, rng) for _ in range(4)], ratio=row.ratios[-1])


def _not_finite(row: Row) -> Iterator[Case]:
    cases: tuple[tuple[float, dict[str, Any]], ...] = ((np.nan, {}), (np.inf, {}), (-np.inf, {"warmup": 2.0}))
    for bad, settings in cases:
        steps = _several(2, 3, np.random.default_rng(0))
        poisoned = steps[1][0]["c"]
        assert poisoned is not None
        poisoned[17] = bad
        for residual in (True,) if row.momentum else (True, False):
            yield Case(steps, settings={"granularity": 4096, "residual": residual, **settings})


def _worlds(row: Row) -> Iterator[Case]:
    for world in (1, 2, 4):
        for c in (None, 1.0):
            steps = _several(world, 4, np.random.default_rng(11))
            for number, given_now in enumerate(steps):
                for rank, of_worker in enumerate(given_now):
                    if rank == 1 and number < 2:
                        of_worker |= {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
                    if rank == 3:
                        of_worker["c"] = None if number else of_worker["c"]
            yield Case(steps, ratio=row.ratios[0], settings={"granularity": 4096, "warmup": c}, saved_after=3)


def _types(row: Row) -> Iterator[Case]:
    rng = np.random.default_rng(2)
    for dtype in (np.float16, np.float32, np.float64):
        residual_dtype = "float64" if dtype == np.float64 else "float32"
        steps = [gradients("pareto", 600, rng).astype(dtype).reshape(20, 30).T for _ in range(4)]
        yield alone(steps, residual_dtype=residual_dtype, saved_after=2)
        wild = [np.ldexp(rng.normal(size=333), rng.integers(-100, 100, 333)) for _ in range(3)]
        if dtype != np.float16:
            yield alone([gradient.astype(dtype) for gradient in wild], residual_dtype=residual_dtype)


def _saved(row: Row) -> Iterator[Case]:
    rng = np.random.default_rng(7)
    for saved_after in (1, 13):
        yield alone([gradients("pareto", 2000, rng) for _ in range(26)], ratio=0.01, saved_after=saved_after)
    steps = [gradients("laplace", 2000, rng) for _ in range(20)]
    yield alone(steps, ratio=Halving(0.4, 0.1, 5), saved_after=7)
    yield alone(steps, settings={"warmup": 2.0}, saved_after=7)


def _settings(row: Row) -> Iterator[Case]:
    rng = np.random.default_rng(1)
    for settings in ({"residual": False}, {"lr_in_residual": True}, {"slack": 1.0}):
        if row.momentum and settings.get("residual") is False:
            continue
        rates = (0.1, 0.1, 0.01, 0.0, 0.05, 0.05)
        yield alone([gradients("laplace", 1000, rng) for _ in rates], settings=settings, rates=rates)


def _given_up(row: Row) -> Iterator[Case]:
    yield Case(_several(2, 4, np.random.default_rng(3)), settings={"granularity": 4096}, given_up=2)


def _overflow(row: Row) -> Iterator[Case]:
    """In a residual, which stays finite. The step fails on both workers."""
    for dtype in ("float32", "float64"):
        huge = np.linspace(0.5, 0.6, 300).astype(dtype) * np.finfo(dtype).max
        steps: list[Given] = [[{"p": huge}, {"p": np.ones(300, dtype)}]] * 4
        yield Case(steps, ratio=0.01, residual_dtype=dtype)


GROUPS = {
    make.__name__[1:]: make
    for make in (_degenerate, _kinds, _not_finite, _worlds, _types, _saved, _settings, _given_up, _overflow)
}


@lru_cache(maxsize=1)
def _expected(row: Row, group: str) -> list[tuple[Case, Seen]]:
    return [(case, observe(ORACLE, row, case)) for case in GROUPS[group](row)]


NUMBERS = ("degenerate", "kinds")
"""Groups that are about the operations on arrays; the others are about their way."""
SAME_OPERATIONS = ("torch", "tensorflow")
"""Backends with the operations of others: of "numpy-compiled" and "torch-operations", and of the oracle."""
PAIRS = [
    (group, backend)
    for group in GROUPS
    for backend in OTHERS
    if not (group in NUMBERS and backend.name in SAME_OPERATIONS)
]


# Innermost the backends, so that what the oracle does is computed once for all of them.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("group", "backend"), PAIRS, ids=str)
@pytest.mark.parametrize("row", COMPRESSORS, ids=str)
def test_every_backend_does_what_the_oracle_does(row: Row, group: str, backend: Backend) -> None:
    for case, expected in _expected(row, group):
        assert_same(observe(backend, row, case), expected)


FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


@pytest.mark.parametrize("backend", OTHERS, ids=str)
@given(data=st.data())
def test_whatever_the_gradient_every_backend_does_what_the_oracle_does(backend: Backend, data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(COMPRESSORS))
    size = data.draw(st.integers(1, 300))
    dtype = data.draw(st.sampled_from(("float32", "float64")))
    drawn = data.draw(st.lists(npst.arrays(np.float32, size, elements=FINITE), min_size=1, max_size=3))
    ratio = data.draw(st.sampled_from((1.0, 0.5, 0.1, 0.01)))
    case = alone([gradient.astype(dtype) for gradient in drawn], ratio=ratio, residual_dtype=dtype)
    assert_same(observe(backend, row, case), observe(ORACLE, row, case))
