"""Wherever an exception comes in a step: nothing is lost, everything is of one moment, and the next step works."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from driver import exchange_all, make_pipelines
from hypothesis import settings as profile
from table import BACKENDS

import horovod_sparse
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.dgc import DGC
from horovod_sparse.compressors.micro import MiCRO
from horovod_sparse.compressors.momentum import Clip, MomentumCorrection
from horovod_sparse.compressors.randomk import RandomK
from horovod_sparse.compressors.sidco import SIDCo
from horovod_sparse.compressors.topk import TopK
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.exchange.balanced import Balanced
from horovod_sparse.exchange.hierarchical import Hierarchical
from horovod_sparse.exchange.pairs import Pairs
from horovod_sparse.exchange.protocols import Exchange
from horovod_sparse.exchange.union import Union
from horovod_sparse.numpy.allreduce import SparseAllreduce

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PACKAGE = str(Path(horovod_sparse.__file__).parent)
SHAPES = {"weight": (40, 30), "kernel": (500,), "head": (77,), "bias": (5,)}
DENSE = "bias"
MOMENTUM = MomentumCorrection(0.5, masking=True)
SETTLED = 3
"""The number of steps before the one that is interrupted."""
EVERY = 5 if profile.get_current_profile_name() == "full" else 23
"""An exception comes at one of so many lines, with one backend or the other."""


class Case(NamedTuple):
    make: Callable[..., Compressor]
    settings: dict[str, Any] = {}  # noqa: RUF012
    rates: tuple[float, ...] = (0.5,)
    """The learning rates: of the steps before, of the interrupted one, and of those that follow, in turn."""
    poison: float = 0.0
    """What is added to an entry of the interrupted step's last gradient."""
    scale: float | None = None
    """The scale of the loss."""
    undoes: bool = False
    """Whether a step that fails, or is given up, leaves no trace."""


class Dense(TopK):
    """Sends everything, as others do at the beginning of a warm-up. One worker alone has none."""

    def first_sparse_step(self, world: int) -> int:
        return 9


CASES = {
    "pairs": Case(TopK),
    "sidco": Case(SIDCo),
    "layer": Case(SIDCo, {"granularity": "layer"}),
    "momentum": Case(TopK, {"momentum": MOMENTUM}),
    "nesterov": Case(TopK, {"momentum": MomentumCorrection(0.5, nesterov=True)}),
    "clipped": Case(DGC, {"clip": Clip(1.0, "model")}),
    "clipped-layer": Case(SIDCo, {"clip": 1.0}),
    "undone": Case(SIDCo, {"momentum": MOMENTUM}, undoes=True),
    "rates": Case(SIDCo, {"lr_in_residual": True}, (0.5, 0.1, 0.2)),
    "rates-zero": Case(TopK, {"lr_in_residual": True}, (0.5, 0.0, 0.2)),
    "rates-undone": Case(MiCRO, {"lr_in_residual": True}, (0.5, 0.1, 0.2), undoes=True),
    "dense": Case(Dense, {"momentum": MOMENTUM}),
    "union": Case(MiCRO),
    "union-momentum": Case(TopK, {"exchange": Union(), "momentum": MOMENTUM}),
    "shared": Case(RandomK),
    "balanced": Case(TopK, {"exchange": Balanced(), "momentum": MOMENTUM}),
    "packed": Case(TopK, {"exchange": Pairs("packed")}),
    "float64": Case(SIDCo, {"residual": "float64", "exchange": Pairs("packed")}),
    "nan": Case(SIDCo, {"momentum": MOMENTUM}, poison=np.nan),
    "nan-union": Case(MiCRO, poison=np.inf),
    "scaled": Case(SIDCo, scale=4.0),
    "scaled-nan": Case(SIDCo, poison=np.nan, scale=4.0),
}


class Lines:
    """Counts what Python does in the package: lines, and returns. Raises KeyboardInterrupt before number `at`."""

    def __init__(self, at: int | None) -> None:
        self.number, self.at = 0, at

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event in ("line", "return"):
            self.number += 1
            if self.number == self.at:
                raise KeyboardInterrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}, {event}")
        return self


def traced(act: Callable[[], Any], at: int | None = None) -> tuple[int, str | None]:
    """Return how many lines an action takes, and where it was interrupted."""
    lines, place = Lines(at), None
    sys.settrace(lines)
    try:
        # A step with NaN ends with an error of its own.
        with suppress(FloatingPointError):
            act()
    except KeyboardInterrupt as interrupt:
        place = str(interrupt)
    finally:
        sys.settrace(None)
    return lines.number, place


class Worker:
    """One worker, after some steps."""

    def __init__(self, case: Case, backend: Any, until: str) -> None:
        self.case = case
        self.reduce = SparseAllreduce(None, case.make(0.1, **{"min_numel": 10, **case.settings}))
        self.step = 0
        self.reduce._new_pipeline = partial(self.reduce._new_pipeline, ops=backend.ops)
        self.reduce._plan(self.gradients())
        pipeline = self.pipeline = self.reduce.pipeline
        start = pipeline.start_step
        begin = partial(start, scale=case.scale, undoes=case.undoes)
        pipeline.start_step = begin  # type: ignore[method-assign]
        for _ in range(SETTLED):
            self.take_step()
        if until == "whole":
            pipeline.start_step(self.gradients().values())
            for name, gradient in self.gradients().items():
                if name != DENSE:
                    pipeline.arrive(name, gradient, self.rate)
            pipeline.abort()
        elif until == "after":
            traced(self.take_step)

    def gradients(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.step)
        given = {name: rng.laplace(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
        given["weight"][0, 0] += self.case.poison if self.step == SETTLED else 0.0
        return {name: gradient * np.float32(self.case.scale or 1.0) for name, gradient in given.items()}

    @property
    def rate(self) -> float | None:
        return self.case.rates[max(self.step - SETTLED + 1, 0) % len(self.case.rates)]

    def take_step(self) -> dict[str, np.ndarray]:
        reduced = self.reduce(self.gradients(), learning_rate=self.rate)
        self.step += 1
        return reduced


class Group:
    """Four workers on two hosts, after some steps."""

    def __init__(self, backend: Any, settings: dict[str, Any], until: str) -> None:
        self.backend, self.step = backend, 0
        compressor = TopK(0.1, momentum=MOMENTUM, warmup=None, **settings)
        shapes = {name: shape for name, shape in SHAPES.items() if name != DENSE}
        self.pipelines = make_pipelines(backend, compressor, shapes, "aabb")
        for _ in range(SETTLED):
            self.take_step()
        if until != "before":
            self.take_step(ends=until == "after")

    def take_step(self, *, ends: bool = True) -> None:
        rng = np.random.default_rng(self.step)
        for pipeline in self.pipelines:
            pipeline.start_step()
            for name, slot in pipeline.buckets[0].slots.items():
                pipeline.arrive(name, rng.laplace(size=slot.shape).astype(np.float32))
        exchange_all(self.backend, self.pipelines)
        self.step += 1
        for pipeline in self.pipelines if ends else ():
            pipeline.end_step()


def held(pipeline: Pipeline) -> dict[str, Any]:
    pipeline.abort()
    return {**pipeline.state_dict(), "tallies": repr([bucket.tally for bucket in pipeline.buckets])}


def matching(kept: dict[str, Any], moments: dict[str, dict[str, Any]], name: str, *, exact: bool) -> set[str]:
    """The moments of which a parameter's residual and velocity may be."""

    def alike(part: str, moment: str) -> bool:
        mine, theirs = kept[part].get(name), moments[moment][part].get(name)
        if mine is None or theirs is None:
            return mine is theirs
        return np.array_equal(mine, theirs) if exact else np.allclose(mine, theirs, rtol=1e-5, atol=1e-6)

    return {moment for moment in moments if all(alike(part, moment) for part in ("residuals", "velocities"))}


@pytest.mark.parametrize("backend", [one for one in BACKENDS if one.name.startswith("numpy")], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_an_exception_at_any_line_loses_nothing(name: str, backend: Any) -> None:
    """Another one comes while the step is given up."""
    case = CASES[name]
    moments = {until: held(Worker(case, backend, until).pipeline) for until in ("before", "whole", "after")}
    number, _ = traced(Worker(case, backend, "before").take_step)
    # Every backend has its turn: they share all but the operations on arrays.
    first = sum(map(ord, name)) + EVERY * BACKENDS.index(backend)
    aborting, swallowed, places = 30, 0, range(1 + first % (2 * EVERY), number + 1, 2 * EVERY)
    for at in places:
        worker = Worker(case, backend, "before")
        pipeline, abort = worker.pipeline, worker.pipeline.abort
        # The adapter's own attempt is left out.
        pipeline.abort = lambda: None  # type: ignore[method-assign]
        _, place = traced(worker.take_step, at)
        pipeline.abort = abort  # type: ignore[method-assign]
        if place is None:
            # It has come while Python removed a generator.
            swallowed += 1
            continue
        lines, too = traced(abort, 1 + at % aborting)
        aborting = max(aborting, lines)
        check(worker, moments, f"{place}, then {too}")
    assert number > 300 and swallowed < 3 + len(places) // 20


@pytest.mark.parametrize("name", ["momentum", "rates", "rates-undone"])
def test_giving_up_may_be_interrupted_at_any_line(name: str) -> None:
    """Twice: what has been taken returns once, in the unit of before the step."""
    case, backend = CASES[name], next(one for one in BACKENDS if one.name == "numpy")

    def in_a_step() -> Worker:
        worker = Worker(case, backend, "before")
        worker.pipeline.start_step(worker.gradients().values())
        for parameter, gradient in worker.gradients().items():
            bucket = None if parameter == DENSE else worker.pipeline.arrive(parameter, gradient, worker.rate)
            if bucket is not None:
                bucket.begin()
        return worker

    moments = {until: held(Worker(case, backend, until).pipeline) for until in ("before", "whole")}
    number, _ = traced(in_a_step().pipeline.abort)
    for at in range(1, number + 1):
        worker = in_a_step()
        for _ in range(2):
            _, place = traced(worker.pipeline.abort, at)
        check(worker, moments, f"{place}, twice")


def test_a_step_that_fails_leaves_no_trace_though_its_end_was_interrupted() -> None:
    case, backend = CASES["undone"], next(one for one in BACKENDS if one.name == "numpy")

    def in_a_step() -> Pipeline:
        pipeline = Worker(case, backend, "before").pipeline
        pipeline.start_step([])
        for parameter, shape in SHAPES.items():
            bucket = None if parameter == DENSE else pipeline.arrive(parameter, np.ones(shape, np.float32))
            if bucket is not None:
                pipeline.advance(bucket, bucket.begin().message, 1.0, lambda slots, reduced: None)
        pipeline.note_not_finite(f"parameter {DENSE!r}")
        return pipeline

    before = held(Worker(case, backend, "before").pipeline)
    number, _ = traced(in_a_step().end_step)
    for at in range(1, number + 1):
        pipeline = in_a_step()
        _, place = traced(pipeline.end_step, at)
        kept = held(pipeline)
        assert kept["adaptive"] == before["adaptive"] and kept["tallies"] == before["tallies"], place
        for name, residual in before["residuals"].items():
            np.testing.assert_array_equal(kept["residuals"][name], residual, place)


@pytest.mark.parametrize("backend", [one for one in BACKENDS if one.name.startswith("numpy")], ids=str)
@pytest.mark.parametrize("exchange", [Balanced(), Hierarchical()], ids=repr)
def test_an_exception_at_any_line_loses_nothing_of_what_workers_own(exchange: Exchange, backend: Any) -> None:
    settings = {"exchange": exchange}
    untils = {
        until: [held(one) for one in Group(backend, settings, until).pipelines]
        for until in ("before", "whole", "after")
    }
    number, _ = traced(Group(backend, settings, "before").take_step)
    for at in range(1, number + 1, 5 * EVERY):
        group = Group(backend, settings, "before")
        _, place = traced(group.take_step, at)
        assert place is not None
        for rank, pipeline in enumerate(group.pipelines):
            check_held(held(pipeline), {until: all_held[rank] for until, all_held in untils.items()}, place, exact=True)
        states = [pipeline.state_dict() for pipeline in group.pipelines]
        for pipeline, state in zip(group.pipelines, states, strict=True):
            # Some workers may have ended the step.
            pipeline.load_state_dict({**state, "adaptive": states[0]["adaptive"]})
        group.take_step()


def check(worker: Worker, moments: dict[str, dict[str, Any]], place: str) -> None:
    kept = held(worker.pipeline)
    check_held(kept, moments, place, exact=worker.case.rates == (0.5,))
    # The next step.
    worker.step = SETTLED + 1
    given, reduced = worker.gradients(), worker.take_step()
    after = worker.reduce.state_dict()["residuals"]
    if not (worker.case.settings or worker.case.scale):
        for name in after:
            np.testing.assert_array_equal(reduced[name] + after[name], kept["residuals"][name] + given[name], place)
    assert all(np.isfinite(array).all() for array in (*after.values(), *reduced.values())), place
    for _ in range(2):
        worker.take_step()


def check_held(kept: dict[str, Any], moments: dict[str, dict[str, Any]], place: str, *, exact: bool) -> None:
    """A worker must hold what it held before the step, or the gradients too that have arrived, or what it holds after it."""
    found = {name: matching(kept, moments, name, exact=exact) for name in SHAPES}
    assert all(found.values()), f"{place}: {found}"
    parts = ("adaptive", "tallies", "learning_rates")
    of_all = {moment for moment, other in moments.items() if all(kept[part] == other[part] for part in parts)}
    assert of_all, place
    if "after" in of_all and of_all.isdisjoint(("before", "whole")):
        assert all("after" in of_one for of_one in found.values()), f"{place}: {found}"
    else:
        assert all(of_one != {"after"} for of_one in found.values()), f"{place}: {found}"
