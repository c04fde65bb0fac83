"""The states of a run that has ended, as one that every worker of a run with another number of workers loads. No framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from horovod_sparse.compressors.checks import check_integer
from horovod_sparse.core.state import ARRAYS, check_form

State = Mapping[str, Any]


def joined(states: Iterable[State], *, workers: int | None = None) -> dict[str, Any]:
    """Return the one state that every worker of a new run loads, given those of all N workers of a run that has ended.

    N old workers have the residuals e_1 ... e_N. Each of the M new workers, whatever M is, loads

        e' = (e_1 + ... + e_N) / N

    The new run averages what its workers send: (M * e') / M = (e_1 + ... + e_N) / N. So all that waits arrives, with the weight
    that it had. Workers that reduce with `op=Sum` add up M * e' instead, and give `workers=M`: e' is then the sum divided by M.

    Velocities are joined as residuals are. Adaptive states (thresholds, numbers of steps) are those of the first state; all
    workers then begin with the same.

    The states of local updates are joined by their "compression". Those of a sharded model are joined shard by shard.

    Args:
        states: what `state_dict()` returned after the same step on every worker of the old run, each once, in rank order. They
            are read one after the other, so a generator that loads one file at a time saves memory. They do not change.
        workers: only with `op=Sum`, the number of workers of the new run, >= 1.

    Raises:
        ValueError: there is no state, or the states are not of one run: of another release, algorithm, step, or model. A state
            that is left out cannot be noticed: what waits in it is lost.
    """
    if workers is not None:
        check_integer("workers", workers, 1)
    first: State | None = None
    count = 0
    sums: dict[str, dict[str, Any]] = {part: {} for part in ARRAYS}
    for count, state in enumerate(states, 1):
        check_form(state, f"states[{count - 1}]")
        first = state if first is None else first
        _check_same(first, state, count - 1)
        for part in ARRAYS:
            for name, array in state[part].items():
                total = sums[part].get(name)
                sums[part][name] = array if total is None else total + array
    if first is None:
        raise ValueError("states must be those of all workers of a run, got none; load the file of each of them")
    share = count if workers is None else workers
    means = {part: {name: total / share for name, total in sums[part].items()} for part in ARRAYS}
    return {**first, **means}


def _check_same(first: State, state: State, number: int) -> None:
    """Raise ValueError unless two states are those of workers of one run, after the same step."""
    for part in ARRAYS:
        shapes, theirs = ({name: tuple(one.shape) for name, one in some[part].items()} for some in (first, state))
        if shapes != theirs:
            differ = sorted(name for name in shapes.keys() | theirs.keys() if shapes.get(name) != theirs.get(name))
            raise ValueError(
                f"states must have the {part} of the same parameters, with the same shapes, but states[0] and states[{number}] "
                f"differ in {differ}; give the states that the workers of one run have saved"
            )
    for name, adaptive in first["adaptive"].items():
        other = state["adaptive"][name]
        if adaptive.keys() != other.keys():
            raise ValueError(
                f"states must be of the same algorithm, but states[0] keeps {sorted(adaptive)} of {name!r}, and "
                f"states[{number}] {sorted(other)}; give the states that the workers of one run have saved"
            )
        if adaptive["step"] != other["step"]:
            raise ValueError(
                f"states must be of the same step, but {name!r} has made {adaptive['step']} steps in states[0] and "
                f"{other['step']} in states[{number}]; give what all workers have saved after the same step"
            )
