"""The state goes from one framework to the other."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from horovod_sparse.compressors import SIDCo, TopK
from horovod_sparse.compressors.base import ALONE, BucketState, Compressor, Place
from horovod_sparse.core.state import empty_state
from horovod_sparse.core.store import Store
from horovod_sparse.ops.protocol import Ops, Selection
from tests.harness.table import BACKENDS, COMPRESSORS, ORACLE, Backend, Row, gradients, gradients_of
from tests.harness.worker import Worker
from tests.harness.workers import make_worker, send, step, take_step, worker_of

PAIRS = list(itertools.pairwise([*BACKENDS, ORACLE]))
"""Each backend takes over from one and hands over to one."""
ROWS = [row for row in COMPRESSORS if row.name in ("dgc", "sidco-gamma-robust", "micro")]
"""With velocities, an adaptive state with lists, and a threshold; `test_backends` sees that all save the same, for all."""


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda backend: str(backend))
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_another_framework_goes_on_where_one_stopped(source: Backend, target: Backend, row: Row) -> None:
    rng = np.random.default_rng(0)
    one = make_worker(source, row.make(0.05), {"p": (20, 30)})
    other = make_worker(target, row.make(0.05), {"p": (20, 30)})
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


SHAPES = {"p": (600,), "q": (500,)}


def serve(compressor: Compressor, *names: str) -> Store:
    """What adapters bind to a compressor, with buckets for some parameters."""
    store = Store(compressor)
    if names:
        store.feedback = make_worker(ORACLE, compressor, {name: SHAPES[name] for name in names})
    return store


def given(step: int) -> dict[str, np.ndarray]:
    return gradients_of(SHAPES, np.random.default_rng(step))


def steps(compressor: Compressor, worker: Worker, first: int, last: int) -> list[Any]:
    """What is sent of each parameter in some steps."""
    rates = [0.1 * 0.8**step if compressor.lr_in_residual else None for step in range(last)]
    return [take_step(ORACLE, [worker], [given(step)], rates[step]) for step in range(first, last)]


def trained(compressor: Compressor) -> Worker:
    worker = make_worker(ORACLE, compressor, SHAPES)
    steps(compressor, worker, 0, 3)
    return worker


RESCALED = [row for row in COMPRESSORS if row.name in ("sidco-gamma-robust", "micro", "threshold", "topk", "dgc")]


@pytest.mark.parametrize("lr_in_residual", [False, True])
@pytest.mark.parametrize("row", RESCALED, ids=str)
def test_a_state_that_is_deferred_is_rescaled_as_one_that_is_used(row: Row, lr_in_residual: bool) -> None:
    make = functools.partial(row.make, 0.05, lr_in_residual=lr_in_residual)
    one, store = trained(make()), serve(make())
    store.load(one.state_dict())
    store.rescale(0.25)
    one.rescale(0.25)
    assert repr({**store.state_dict(), "sparse": []}) == repr({**one.state_dict(), "sparse": []})
    other = make_worker(ORACLE, store.compressor, SHAPES)
    other.load_state_dict(store.state_dict())
    np.testing.assert_equal(steps(make(), other, 3, 6), steps(make(), one, 3, 6))


def test_a_deferred_state_is_a_copy() -> None:
    store, state = serve(TopK(0.1, warmup=None)), trained(TopK(0.1, warmup=None)).state_dict()
    kept = copy.deepcopy(state)
    store.load(state)
    state["residuals"]["p"][:] = 7.0
    store.state_dict()["residuals"]["q"][:] = 7.0
    store.rescale(2.0)
    for name in SHAPES:
        np.testing.assert_array_equal(store.state_dict()["residuals"][name], 2.0 * kept["residuals"][name])
    store.reset()
    assert store.state_dict() == empty_state()


def test_what_belongs_to_no_bucket_yet_is_deferred() -> None:
    state = trained(SIDCo(0.05, warmup=None)).state_dict()
    store = serve(SIDCo(0.05, warmup=None), "p")
    store.load_part(state, {"p"})
    assert store.feedback is not None and store.deferred is not None
    assert store.feedback.state_dict()["residuals"].keys() == {"p"} and store.deferred["residuals"].keys() == {"q"}
    np.testing.assert_equal(store.state_dict(), {**state, "sparse": []})
    store.rescale(4.0)
    for name in SHAPES:
        np.testing.assert_array_equal(store.state_dict()["residuals"][name], 4.0 * state["residuals"][name])
    store.reset()
    assert not store.state_dict()["residuals"]["p"].any() and store.deferred is None


@pytest.mark.parametrize("names", ["pq", "q", ""])
def test_a_state_that_is_refused_changes_nothing(names: str) -> None:
    state = trained(SIDCo(0.05, warmup=None)).state_dict()
    store = serve(SIDCo(0.05, warmup=None), "p")
    store.load_part(state, {"p"})
    before = store.state_dict()
    with pytest.raises(ValueError, match=r"^residuals must be .*missing: .*'[pq]'"):
        store.load_part(trained(SIDCo(0.05, warmup=None)).state_dict(), names)
    np.testing.assert_equal(store.state_dict(), before)


@dataclass
class Remembering(BucketState):
    """A state with a list, as the guide allows, and with an object."""

    saved: ClassVar[tuple[str, ...]] = ("window",)
    window: list[int] = field(default_factory=list)
    others: dict[str, list[int]] = field(default_factory=dict)


def test_copies_of_a_state_share_nothing_with_it() -> None:
    state = Remembering(window=[1], others={"a": [1]})
    copied, saved, loaded = state.copied(), state.state_dict(), Remembering()
    loaded.load_state_dict(saved)
    for one in (state, loaded):
        one.window.append(2)
    state.others["a"].append(2)
    assert saved == {"step": 0, "window": [1]}
    assert (state.window, loaded.window) == ([1, 2], [1, 2])
    assert (copied.window, copied.others) == ([1], {"a": [1]})


def test_residuals_in_units_of_the_update_are_not_taken_for_gradients() -> None:
    saved = serve(TopK(0.1, lr_in_residual=True, warmup=None), "p", "q")
    assert saved.feedback is not None
    take_step(ORACLE, [cast(Worker, saved.feedback)], [given(0)], 0.5)
    state = saved.state_dict()
    other = serve(TopK(0.1, warmup=None), "p", "q")
    before = other.state_dict()
    with pytest.raises(ValueError, match="state must be one with lr_in_residual=False, got one with"):
        other.load(state)
    assert repr(other.state_dict()) == repr(before)
    same = serve(TopK(0.1, lr_in_residual=True, warmup=None), "p", "q")
    with pytest.raises(ValueError, match="state must be one with lr_in_residual=True, got one with"):
        same.load(before)
    same.load(state)
    np.testing.assert_array_equal(same.state_dict()["residuals"]["p"], state["residuals"]["p"])


def _changed(state: Any, part: str, **changed: Any) -> Any:
    return {**state, part: {**state[part], **changed}}


def _without(state: Any, part: str, name: str) -> Any:
    return {**state, part: {one: value for one, value in state[part].items() if one != name}}


def _residual(value: Any, dtype: Any = np.float32) -> Any:
    return lambda state: _changed(state, "residuals", head=np.full((7, 11), value, dtype))


def _adaptive(name: str, value: Any) -> Any:
    return lambda state: _changed(state, "adaptive", head={**state["adaptive"]["head"], name: value})


_HEAD = r"^state\['residuals'\]\['head'\]"
DAMAGES: dict[str, tuple[Any, str]] = {
    "not a dict": (lambda state: None, "^state must be .* got NoneType"),
    "another version": (lambda state: {**state, "version": 1}, "state must have version 4, got 1"),
    "a part is None": (lambda state: {**state, "velocities": None}, r"state\['velocities'\] must be .*, got None"),
    "a part is missing": (
        lambda state: {p: value for p, value in state.items() if p != "velocities"},
        r"state\['velocities'\] must be .*, got None",
    ),
    "a residual is missing": (lambda state: _without(state, "residuals", "head"), r"state\['adaptive'\] must .*'head'"),
    "a residual more": (
        lambda state: _changed(state, "residuals", more=np.zeros(3)),
        r"state\['adaptive'\] must .*'more'",
    ),
    "another shape": (
        lambda state: _changed(state, "residuals", head=np.zeros(77, np.float32)),
        r"^residuals must be .*{'head': \(\(77,\), \(7, 11\)\)}.* same model",
    ),
    "a velocity more": (
        lambda state: _changed(state, "velocities", head=np.zeros((7, 11), np.float32)),
        r"^velocities must be .* missing: \[\], unexpected: \['head'\].* momentum",
    ),
    "NaN": (_residual(np.nan), f"{_HEAD} must be finite"),
    "infinity": (_residual(np.inf), f"{_HEAD} must be finite"),
    "complex": (_residual(1j, np.complex64), f"{_HEAD} must be .* got 'complex64'"),
    "boolean": (_residual(True, np.bool_), f"{_HEAD} must be .* got 'bool'"),
    "integers": (_residual(1, np.int64), f"{_HEAD} must be .* got 'int64'"),
    "text": (lambda state: _changed(state, "residuals", head="text"), f"{_HEAD} must be .* got 'str'"),
    "a unit that is missing": (
        lambda state: {part: value for part, value in state.items() if part != "lr_in_residual"},
        r"state\['lr_in_residual'\] must be True or False, got None",
    ),
    "a unit of 1.0": (
        lambda state: {**state, "lr_in_residual": 1.0},
        r"state\['lr_in_residual'\] must be True or False, got 1\.0",
    ),
    "another unit": (
        lambda state: {**state, "lr_in_residual": True},
        "state must .*lr_in_residual=False, got .*lr_in_residual=True",
    ),
    "sparse": (lambda state: {**state, "sparse": [1]}, r"state\['sparse'\] must be .*, got \[1\]"),
    "no adaptive state": (lambda state: _without(state, "adaptive", "head"), r"state\['adaptive'\] must .*'head'"),
    "another algorithm": (
        lambda state: _changed(state, "adaptive", head={}),
        "adaptive state must be .*'aim'.* got {}",
    ),
    **{
        f"{name}={value!r}": (_adaptive(name, value), f"adaptive state must .*{name}.* got .*{re.escape(repr(value))}")
        for name, values in {
            "step": (-1, 1.5, True, None, 10**30),
            "aim": (math.nan, math.inf, -1.0, 0.0, 1e9, 1, None, "1"),
            "cut": (math.nan, -1.0, 0.0, 1, None),
            "stages": (0, -3, 10**9, 2.0, True, None),
            "windows_seen": (-1, 0.5, None),
            "window": (None, [math.nan], [-1.0], [1.0] * 5, ["x"], [None], 3.0),
            "errors": (
                None,
                [[1, 2]],
                [[2, 0.1, 1], [2, 0.2, 1]],
                [[0, 0.1, 1]],
                [[10**9, 0.1, 1]],
                [[1, math.nan, 1]],
                [[1, 0.1, -1]],
                [3],
            ),
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("backend", [one for one in BACKENDS if one.name in ("numpy", "torch")], ids=str)
@pytest.mark.parametrize(("damage", "expected"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_is_refused_and_changes_nothing(backend: Backend, damage: Any, expected: str) -> None:
    worker = worker_of(backend, SIDCo(0.1, warmup=None))
    for seed in range(7):
        step(backend, worker, seed)
    before = worker.state_dict()
    with pytest.raises(ValueError, match=expected):
        worker.load_state_dict(damage(worker.state_dict()))
    after = worker.state_dict()
    assert after["adaptive"] == before["adaptive"]
    for parameter, residual in before["residuals"].items():
        np.testing.assert_array_equal(backend.numpy(after["residuals"][parameter]), backend.numpy(residual))


@pytest.mark.parametrize("row", COMPRESSORS, ids=str)
def test_damaged_numbers_of_every_algorithm_are_refused(row: Row) -> None:
    worker = make_worker(ORACLE, row.make(0.1), {"p": (300,)})
    rng = np.random.default_rng(0)
    for _ in range(3):
        send(ORACLE, worker, gradients("laplace", 300, rng))
    state = worker.state_dict()
    for name, value in state["adaptive"]["p"].items():
        for damaged in (math.nan, -math.inf, None, "text", [None]) if not isinstance(value, list) else (None, [None]):
            with pytest.raises(ValueError, match=f"adaptive state must .*{name}.* got "):
                worker.load_state_dict({**state, "adaptive": {"p": {**state["adaptive"]["p"], name: damaged}}})
    worker.load_state_dict(state)


@dataclass
class _Ages(BucketState):
    saved: ClassVar[tuple[str, ...]] = ("ages", "histogram")
    ages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """One for each entry."""
    histogram: np.ndarray = field(default_factory=lambda: np.zeros((2, 3)))


class _Oldest(Compressor):
    """The entries that have waited longest."""

    def new_state(self, place: Place = ALONE) -> _Ages:
        return _Ages(place, ages=np.zeros(place.numel, np.int32))

    def select(self, ops: Ops, x: Any, k: int, capacity: int, state: BucketState) -> Selection:
        assert isinstance(state, _Ages) and len(state.ages) == len(x) == state.place.numel
        chosen = np.sort(np.argsort(-state.ages, kind="stable")[:k])
        state.ages += 1
        state.ages[chosen] = 0
        state.histogram[0, 0] += ops.as_numpy(x)[chosen].sum()
        return Selection(ops.indices(chosen, x), k)


def test_arrays_are_a_state() -> None:
    """They go on where they were saved, as plain lists, and come back if a step fails."""
    compressor = _Oldest(0.1, warmup=None)
    worker = trained(compressor)
    saved = worker.state_dict()
    ages, histogram = (saved["adaptive"]["p"][name] for name in ("ages", "histogram"))
    assert json.loads(json.dumps(ages)) == ages and len(ages) == sum(math.prod(shape) for shape in SHAPES.values())
    assert [len(row) for row in histogram] == [3, 3] and histogram[0][0] != 0.0
    other = make_worker(ORACLE, compressor, SHAPES)
    other.load_state_dict(saved)
    np.testing.assert_equal(steps(compressor, other, 3, 6), steps(compressor, worker, 3, 6))
    assert repr(other.state_dict()) == repr(worker.state_dict()) != repr(saved)
    assert type(other.buckets[0].state.ages) is np.ndarray and other.buckets[0].state.ages.dtype == np.int32  # type: ignore[attr-defined]

    state = worker.buckets[0].state
    assert isinstance(state, _Ages)
    before, checksum = state.copied(), state.checksum()
    state.ages[-1] += 1
    assert before.ages[-1] + 1 == state.ages[-1] and before.checksum() == checksum != state.checksum()


def test_arrays_that_do_not_fit_are_refused_and_change_nothing() -> None:
    compressor = _Oldest(0.1, warmup=None)
    worker = trained(compressor)
    good = worker.state_dict()
    alone = make_worker(ORACLE, compressor, {"p": (600,)})
    with pytest.raises(
        ValueError, match=r"have ages of shape \(600,\), one for each entry of bucket 'p', got \(1100,\); load"
    ):
        alone.buckets[0].state.load_state_dict(good["adaptive"]["p"])
    for wrong, text in (
        ({"ages": ["many"]}, "numbers of int32 in ages: .*; the state is damaged"),
        ({"histogram": [[1.0], [2.0, 3.0]]}, "numbers of float64 in histogram: .*; the state is damaged"),
        ({"ages": 3}, "must be like"),
    ):
        with pytest.raises(ValueError, match=text):
            worker.buckets[0].state.load_state_dict({**good["adaptive"]["p"], **wrong})
    assert repr(worker.state_dict()) == repr(good)
