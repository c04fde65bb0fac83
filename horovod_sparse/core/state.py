"""The state of a compressor: its parts, the checks before any part of it is loaded, and its rescaling. No framework."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.residuals import multiply

VERSION = 4
PARTS = ("residuals", "velocities", "adaptive")
"""The parts of the state, each a mapping by parameter name."""
ARRAYS = ("residuals", "velocities")
_DTYPES = ("float16", "bfloat16", "float32", "float64")

Shapes = Mapping[str, tuple[int, ...]]


def empty_state() -> dict[str, Any]:
    """Return the state before the first step."""
    return {"version": VERSION, "lr_in_residual": False, **{part: {} for part in PARTS}, "sparse": []}


def holds_anything(state: Mapping[str, Any]) -> bool:
    """Return whether a state holds anything of any parameter."""
    return bool(state["residuals"])


def names_in(state: Mapping[str, Any]) -> set[str]:
    """Return the names of all parameters in a state."""
    return set(state["residuals"])


def step_of(state: Mapping[str, Any]) -> int:
    """Return the number of the step that follows a state; 0 if there is nothing in it."""
    return max((one["step"] for one in state["adaptive"].values()), default=0)


def part_of(state: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the part of a state that belongs to some parameters."""
    kept = {part: {name: value for name, value in state[part].items() if name in names} for part in PARTS}
    return {**state, **kept}


def merged(state: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` with the entries of `other` added or replaced."""
    return {**other, **state, **{part: {**state[part], **other[part]} for part in PARTS}}


def check_state(state: Any, compressor: Compressor, shapes: Shapes) -> None:
    """Raise ValueError unless `state` is a state of this release and algorithm, for parameters of these shapes."""
    check_parts(state, compressor)
    _check_shapes("residuals", state["residuals"], shapes, "")
    _check_shapes(
        "velocities", state["velocities"], {} if compressor.momentum is None else shapes, " and the same momentum"
    )
    mine = compressor.lr_in_residual
    if state["lr_in_residual"] != mine:
        raise ValueError(
            f"state must be one with lr_in_residual={mine}, got one with lr_in_residual={not mine}: its residuals are in "
            f"another unit; make the compression with lr_in_residual={not mine}, or begin without this state"
        )


def check_parts(state: Any, compressor: Compressor) -> None:
    """Raise ValueError unless `state` is a state of this release and algorithm, whatever its parameters."""
    check_form(state)
    for adaptive in state["adaptive"].values():
        compressor.new_state().load_state_dict(adaptive)


def check_form(state: Any, called: str = "state") -> None:
    """Raise ValueError, whose text calls the state so, unless `state` is a state of this release, whatever its algorithm."""
    if not isinstance(state, Mapping):
        raise ValueError(f"{called} must be what state_dict() returned, got {type(state).__name__}")
    if state.get("version") != VERSION:
        hint = ": of LocalUpdates' state give the part 'compression'" if "compression" in state else ""
        raise ValueError(
            f"{called} must have version {VERSION}, got {state.get('version')!r}; another release, or not a compressor, saved "
            f"it{hint}"
        )
    in_updates = state.get("lr_in_residual")
    _check(f"{called}['lr_in_residual']", in_updates, "True or False", isinstance(in_updates, bool))
    for part in PARTS:
        found = state.get(part)
        is_part = isinstance(found, Mapping) and _are_names(found)
        _check(f"{called}[{part!r}]", found, "a dict by parameter name", is_part)
    for part in ARRAYS:
        for name, array in state[part].items():
            where = f"{called}[{part!r}][{name!r}]"
            dtype = str(getattr(array, "dtype", type(array).__name__)).removeprefix("torch.")
            _check(where, dtype, f"an array of {' or '.join(_DTYPES)}", dtype in _DTYPES)
            finite = np.isfinite(array) if isinstance(array, np.ndarray) else array.isfinite()
            _check(where, array, "finite", bool(finite.all()))
    sparse = state.get("sparse", [])
    are_sparse = isinstance(sparse, (list, tuple)) and _are_names(sparse)
    _check(f"{called}['sparse']", sparse, "a list of parameter names", are_sparse)
    differ = sorted(state["adaptive"].keys() ^ state["residuals"].keys())
    if differ:
        raise ValueError(
            f"{called}['adaptive'] must name the same parameters as {called}['residuals'], but one of them lacks {differ}; the "
            "state is damaged"
        )


def _are_names(values: Iterable[object]) -> bool:
    return all(isinstance(name, str) for name in values)


def _check(where: str, value: object, expected: str, holds: bool) -> None:
    if not holds:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise ValueError(f"{where} must be {expected}, got {shown}; the state is damaged, load an older one")


def rescale_state(state: Mapping[str, Any], compressor: Compressor, factor: float) -> dict[str, Any]:
    """Return the state with its residuals and velocities multiplied by `factor`; the arrays of `state` change in place."""
    for part in ARRAYS:
        for array in state[part].values():
            multiply(array, factor)
    adaptive = {}
    for name, saved in state["adaptive"].items():
        bucket = compressor.new_state()
        bucket.load_state_dict(saved)
        bucket.rescale(factor)
        adaptive[name] = bucket.state_dict()
    return {**state, "adaptive": adaptive}


def _check_shapes(what: str, arrays: Mapping[str, Any], shapes: Shapes, remedy: str) -> None:
    got = {name: tuple(array.shape) for name, array in arrays.items()}
    missing, unexpected = sorted(shapes.keys() - got.keys()), sorted(got.keys() - shapes.keys())
    reshaped = {name: (got[name], shapes[name]) for name in got.keys() & shapes.keys() if got[name] != shapes[name]}
    if missing or unexpected or reshaped:
        raise ValueError(
            f"{what} must be those of this model's parameters; missing: {missing}, "
            f"unexpected: {unexpected}, of another shape (got, expected): {reshaped}; load a state saved with the same "
            f"model{remedy}"
        )
