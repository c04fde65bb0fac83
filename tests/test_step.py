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
from hypothesis import settings as profile
from table import BACKENDS, ORACLE, Backend

import horovod_sparse
from horovod_sparse.compressors import DGC, MiCRO, RandomK, SIDCo, TopK
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.pipeline import AnyBucket, Pipeline
from horovod_sparse.numpy import SparseAllreduce, VirtualWorkers, allreduce, virtual
from horovod_sparse.public import Clip, MomentumCorrection, Pairs, Union

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
    """What is added to an entry of the interrupted step's gradient of `poisoned`."""
    poisoned: str = "weight"
    scale: float | None = None
    """The scale of the loss."""
    undoes: bool = False
    """Whether a step that fails, or is given up, leaves no trace."""
    world: int = 1


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
    "undone-nan": Case(SIDCo, {"momentum": MOMENTUM}, poison=np.nan, poisoned=DENSE, undoes=True),
    "rates": Case(SIDCo, {"lr_in_residual": True}, (0.5, 0.1, 0.2)),
    "rates-zero": Case(TopK, {"lr_in_residual": True}, (0.5, 0.0, 0.2)),
    "rates-undone": Case(MiCRO, {"lr_in_residual": True}, (0.5, 0.1, 0.2), undoes=True),
    "dense": Case(Dense, {"momentum": MOMENTUM}),
    "union": Case(MiCRO),
    "union-momentum": Case(TopK, {"exchange": Union(), "momentum": MOMENTUM}),
    "shared": Case(RandomK),
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


class Workers:
    """One worker, or several, after some steps."""

    def __init__(self, case: Case, backend: Backend, until: str) -> None:
        self.case, self.step = case, 0
        compressor = case.make(0.1, **{"min_numel": 10, **case.settings})

        def make_pipeline(ops: Any, compressor: Compressor, **where: Any) -> Any:
            pipeline: Any = Pipeline(backend.ops, compressor, **where)
            pipeline.start_step = partial(pipeline.start_step, scale=case.scale, undoes=case.undoes)
            return pipeline

        with pytest.MonkeyPatch.context() as patch:
            for module in (allreduce, virtual):
                patch.setattr(module, "Pipeline", make_pipeline)
            one = case.world == 1
            self.reduce: Any = SparseAllreduce(None, compressor) if one else VirtualWorkers(case.world, compressor)
            for _ in range(SETTLED):
                self.take_step()
        self.pipelines: list[Pipeline] = [self.reduce.pipeline] if one else self.reduce.pipelines
        if until == "whole":
            self.arrive()
            for pipeline in self.pipelines:
                pipeline.abort()
        elif until == "after":
            traced(self.take_step)

    def gradients(self) -> dict[str, np.ndarray]:
        """Those of all workers, where there are several."""
        rng, workers = np.random.default_rng(self.step), (self.case.world,) * (self.case.world > 1)
        given = {name: rng.laplace(size=(*workers, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
        given[self.case.poisoned].flat[0] += self.case.poison if self.step == SETTLED else 0.0
        return {name: gradient * np.float32(self.case.scale or 1.0) for name, gradient in given.items()}

    @property
    def rate(self) -> float | None:
        return self.case.rates[max(self.step - SETTLED + 1, 0) % len(self.case.rates)]

    def arrive(self) -> list[tuple[Pipeline, AnyBucket]]:
        """Let all gradients of a step arrive; return the buckets."""
        complete = []
        for rank, pipeline in enumerate(self.pipelines):
            mine = {name: one.reshape(-1, *SHAPES[name])[rank] for name, one in self.gradients().items()}
            pipeline.start_step(mine.values())
            buckets = [pipeline.arrive(name, gradient, self.rate) for name, gradient in mine.items()]
            complete += [(pipeline, bucket) for bucket in buckets if bucket is not None]
        return complete

    def take_step(self) -> dict[str, np.ndarray]:
        reduced: dict[str, np.ndarray] = self.reduce(self.gradients(), learning_rate=self.rate)
        self.step += 1
        return reduced


def held(workers: Workers) -> list[dict[str, Any]]:
    """What every worker holds."""
    for pipeline in workers.pipelines:
        pipeline.abort()
    tallies = [repr([bucket.tally for bucket in pipeline.buckets]) for pipeline in workers.pipelines]
    return [{**one.state_dict(), "tallies": it} for one, it in zip(workers.pipelines, tallies, strict=True)]


def moments_of(case: Case, backend: Backend, *untils: str) -> dict[str, list[dict[str, Any]]]:
    """What workers hold at each moment. "whole" is none where a step that is given up leaves no trace."""
    undoes = case.undoes or case.scale is not None
    return {until: held(Workers(case, backend, until)) for until in untils if not (undoes and until == "whole")}


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
def test_an_exception_at_any_line_loses_nothing(name: str, backend: Backend) -> None:
    """Another one comes while the step is given up."""
    case = CASES[name]
    moments = moments_of(case, backend, "before", "whole", "after")
    number, _ = traced(Workers(case, backend, "before").take_step)
    # Every backend has its turn: they share all but the operations on arrays.
    first, stride = sum(map(ord, name)) + EVERY * BACKENDS.index(backend), (1 + case.world) * EVERY
    aborting, swallowed, places = 30, 0, range(1 + first % stride, number + 1, stride)
    for at in places:
        workers = Workers(case, backend, "before")
        aborts = [pipeline.abort for pipeline in workers.pipelines]
        with pytest.MonkeyPatch.context() as patch:
            for pipeline in workers.pipelines:
                # The adapter's own attempt is left out.
                patch.setattr(pipeline, "abort", lambda: None)
            _, place = traced(workers.take_step, at)
        if place is None:
            # It has come while Python removed a generator.
            swallowed += 1
            continue
        for abort in aborts:
            lines, too = traced(abort, 1 + at % aborting)
            aborting = max(aborting, lines)
        check(workers, moments, f"{place}, then {too}")
    assert number > 300 and swallowed < 3 + len(places) // 20


@pytest.mark.parametrize(
    ("name", "end"),
    [("momentum", "abort"), ("rates", "abort"), ("rates-undone", "abort"), ("undone-nan", "end_step")],
)
def test_the_end_of_a_step_may_be_interrupted_at_any_line(name: str, end: str) -> None:
    """Twice: what has been taken returns once, in the unit of before the step."""
    case = CASES[name]

    def in_a_step() -> Workers:
        workers = Workers(case, ORACLE, "before")
        for pipeline, bucket in workers.arrive():
            message = bucket.begin().message
            if end == "end_step":
                pipeline.advance(bucket, message, 1.0, lambda slots, reduced: None)
        return workers

    moments = moments_of(case, ORACLE, "before", "whole")
    number, _ = traced(getattr(in_a_step().pipelines[0], end))
    for at in range(1, number + 1):
        workers = in_a_step()
        for action in (end, "abort"):
            _, place = traced(getattr(workers.pipelines[0], action), at)
        check(workers, moments, f"{place}, twice")


def check(workers: Workers, moments: dict[str, list[dict[str, Any]]], place: str) -> None:
    kept = held(workers)
    for rank, mine in enumerate(kept):
        of_rank = {until: everyone[rank] for until, everyone in moments.items()}
        check_held(mine, of_rank, place, exact=workers.case.rates == (0.5,))
    for pipeline in workers.pipelines[1:]:
        # Some workers may have ended the step.
        pipeline.load_state_dict({**pipeline.state_dict(), "adaptive": kept[0]["adaptive"]})
    # The next step.
    workers.step = SETTLED + 1
    given, reduced = workers.gradients(), workers.take_step()
    after = [pipeline.state_dict()["residuals"] for pipeline in workers.pipelines]
    if not (workers.case.settings or workers.case.scale):
        for name in after[0]:
            np.testing.assert_array_equal(
                reduced[name] + after[0][name], kept[0]["residuals"][name] + given[name], place
            )
    for arrays in (*after, reduced):
        assert all(np.isfinite(array).all() for array in arrays.values()), place
    for _ in range(2):
        workers.take_step()


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
