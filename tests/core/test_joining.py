"""The states of one run go on in a run with another number of workers: all that waits arrives, with the weight that it had."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from horovod_sparse.core.joining import joined
from horovod_sparse.numpy import (
    MiCRO,
    MomentumCorrection,
    RandomBlock,
    SIDCo,
    SparseAllreduce,
    TopK,
    VirtualWorkers,
)
from tests.harness.table import gradients_of

SHAPES = {"weight": (40, 50), "kernel": (900,), "bias": (7,)}
MAKERS: dict[str, Callable[..., Any]] = {
    "topk": lambda ratio=0.01: TopK(ratio, warmup=None),
    "sidco": lambda ratio=0.01: SIDCo(ratio, warmup=None),
    "micro": lambda ratio=0.01: MiCRO(ratio, warmup=None),
    "random": lambda ratio=0.01: RandomBlock(ratio, warmup=None),
    "momentum": lambda ratio=0.01: TopK(ratio, warmup=None, momentum=MomentumCorrection(0.5)),
}

Named = dict[str, np.ndarray]
State = dict[str, Any]


def given(workers: int, step: int) -> Named:
    """The gradients of so many workers."""
    each = [gradients_of(SHAPES, np.random.default_rng((step, worker))) for worker in range(workers)]
    return {name: np.stack([one[name] for one in each]) for name in SHAPES}


def states_of(make: Callable[..., Any], workers: int, *, average: bool = True, steps: int = 4) -> list[State]:
    """What so many workers have saved after some steps."""
    run = VirtualWorkers(workers, make(), average=average)
    for step in range(steps):
        run(given(workers, step))
    return [worker.state_dict() for worker in run.feedbacks]


def arrived(make: Callable[..., Any], workers: int, states: list[State], *, average: bool) -> Named:
    """All that arrives in 30 steps without gradients, when workers have loaded these states, and what waits then."""
    run = VirtualWorkers(workers, make(1.0), average=average)
    nothing = {name: np.zeros((workers, *shape), np.float32) for name, shape in SHAPES.items()}
    run(nothing)
    for worker, state in zip(run.feedbacks, states, strict=True):
        worker.load_state_dict(copy.deepcopy(state))
    total = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for _ in range(30):
        for name, result in run(nothing).items():
            total[name] += result
    for worker in run.feedbacks:
        for name, residual in worker.state_dict()["residuals"].items():
            total[name] += residual / (workers if average else 1)
    return total


@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2), (4, 1), (3, 2)])
@pytest.mark.parametrize("name", MAKERS)
def test_what_waits_arrives_with_the_weight_that_it_had(name: str, old: int, new: int, average: bool) -> None:
    """As if the old workers had sent all that waits themselves."""
    states = states_of(MAKERS[name], old, average=average)
    state = joined(states) if average else joined(states, workers=new)
    expected = arrived(MAKERS[name], old, states, average=average)
    got = arrived(MAKERS[name], new, [state] * new, average=average)
    for parameter in states[0]["residuals"]:
        largest = np.abs(expected[parameter]).max()
        assert largest > 0.0 or parameter == "bias", "the test tests nothing"
        np.testing.assert_allclose(got[parameter], expected[parameter], rtol=0.0, atol=1e-6 * largest)


def test_adaptive_states_are_the_first_ones_and_the_states_given_stay() -> None:
    states = states_of(MAKERS["momentum"], 2)
    before = copy.deepcopy(states)
    state = joined(states)
    np.testing.assert_equal(states, before)
    assert state["adaptive"] == states[0]["adaptive"]


def test_a_worker_alone_goes_on_as_it_was() -> None:
    (state,) = states_of(MAKERS["sidco"], 1)
    np.testing.assert_equal(joined([state]), state)


def test_files_may_be_read_one_after_the_other() -> None:
    states = states_of(MAKERS["topk"], 3)

    def read() -> Iterator[State]:
        yield from states

    np.testing.assert_equal(joined(read()), joined(states))


def test_a_joined_state_loads() -> None:
    state = joined(states_of(MAKERS["sidco"], 2))
    reduce = SparseAllreduce(None, MAKERS["sidco"]())
    reduce.load_state_dict(state, {name: array[0] for name, array in given(1, 0).items()})
    np.testing.assert_equal(reduce.state_dict()["residuals"], state["residuals"])


def other_model(state: State) -> None:
    state["residuals"]["weight"] = state["residuals"]["weight"].T


def other_algorithm(state: State) -> None:
    state["adaptive"]["weight"] = {"step": state["adaptive"]["weight"]["step"]}


def other_step(state: State) -> None:
    state["adaptive"]["weight"]["step"] = 3


def of_local_updates(state: State) -> None:
    whole = dict(state)
    state.clear()
    state["compression"] = whole


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (dict.clear, r"^states\[1\] must have version \d+, got None; .* saved it$"),
        (
            of_local_updates,
            r"^states\[1\] must have version .* saved it: of LocalUpdates' state give the part 'compression'$",
        ),
        (
            other_model,
            r"^states must .* states\[0\] and states\[1\] .*'weight'",
        ),
        (
            other_algorithm,
            r"^states must .* states\[0\] .*\[.*\] .*'weight', .* states\[1\] \['step'\]",
        ),
        (other_step, r"^states must .*'weight' .*\b4 .* states\[0\] .*\b3 .* states\[1\]"),
    ],
)
def test_states_of_other_runs_are_refused(damage: Callable[[State], None], message: str) -> None:
    states = copy.deepcopy(states_of(MAKERS["sidco"], 2))
    damage(states[1])
    with pytest.raises(ValueError, match=message):
        joined(states)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="states must be those of all workers of a run, got none"):
        joined([])
    with pytest.raises(ValueError, match=r"states\[0\] must be what state_dict\(\) returned, got str"):
        joined(["rank-0.pt"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="workers must be >= 1, got 0"):
        joined(states_of(MAKERS["topk"], 2), workers=0)
