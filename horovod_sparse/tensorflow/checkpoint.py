"""Checkpoints of a whole training: variables of models and optimizers, residuals, random numbers, and plain values.

Files hold NumPy arrays and JSON (`packing`). Reading them runs no code.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from horovod_sparse.core.checkpoint import Checkpoints, Objects, State, Workers, random_state, set_random_state
from horovod_sparse.core.packing import check_plain, pack, packed_state, unpack, unpacked_state, viewed
from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.exchange import gather_json
from horovod_sparse.tensorflow.names import name_of, plain, same_name

Variable = Any

_GENERATORS = ("seed_generator_state", "StateVar")
"""Names of the variables in which Keras and TensorFlow keep the states of random generators."""
_NOT_DISTRIBUTED = SimpleNamespace(reducer=None, local_variables=(), passes_under_way=0)


def _workers() -> Workers:
    gather = partial(gather_json, name="horovod_sparse.checkpoint", process_set=mpi_ops.global_process_set)
    return Workers(mpi_ops.rank(), mpi_ops.size(), gather)


def _compressors(objects: Objects) -> dict[str, TensorflowCompressor]:
    found = {name: getattr(_distributed(one).reducer, "compressor", one) for name, one in objects.items()}
    # That of an optimizer may have been given as well.
    given = {id(one) for one in objects.values()}
    return {
        name: one
        for name, one in found.items()
        if isinstance(one, TensorflowCompressor) and (one is objects[name] or id(one) not in given)
    }


def _own(objects: Objects) -> bytes:
    arrays = _arrays(objects, shared=False)
    for name, compressor in _compressors(objects).items():
        arrays[f"{name}/state"] = np.frombuffer(packed_state(compressor.state_dict()), np.uint8)
    values = {name: one for name, one in objects.items() if _variables_of(one) is None}
    for name, value in values.items():
        check_plain(name, value)
    return pack(arrays, {"values": values, "random": random_state()})


def _shared(objects: Objects) -> bytes:
    names = {name: [name_of(variable) for variable in one] for name, one in _variables(objects).items()}
    return pack(_arrays(objects, shared=True), {"names": names})


def _arrays(objects: Objects, *, shared: bool) -> State:
    """Return the values of the variables that have the same one on every rank, or of the others, by object and number."""
    # The gradients of these are not reduced, so that they differ between ranks.
    local = frozenset(variable for one in objects.values() for variable in _distributed(one).local_variables)
    arrays = {}
    for name, variables in _variables(objects).items():
        for number, variable in enumerate(variables):
            if np.dtype(plain(variable).dtype.as_numpy_dtype).hasobject:
                raise ValueError(f"variable {name_of(variable)!r} must hold numbers, got {plain(variable).dtype.name}")
            if shared == _is_shared(objects[name], variable, local):
                arrays[f"{name}/{number}"] = plain(variable).numpy()
    return arrays


def _decode(content: bytes) -> State:
    arrays, state = unpack(content)
    states = [key for key in arrays if key.endswith("/state")]
    state["compression"] = {key.removesuffix("/state"): unpacked_state(arrays.pop(key).tobytes()) for key in states}
    # Each of the arrays may be the state of a random generator.
    return {**state, "arrays": arrays, "random": {"arrays": arrays, "host": state.get("random")}}


def _check(objects: Objects, shared: State, own: State) -> tuple[set[str], State]:
    for name, one in objects.items():
        if _variables_of(one) is None:
            raise ValueError(
                f"{name} must have variables, got {type(one).__name__}; leave it out and find it in values"
            )
    return {*shared["names"], *own["compression"], *own["values"]}, own["values"]


def _set(objects: Objects, shared: State, own: State) -> None:
    # For all variables, and for random generators.
    arrays, generators = (shared["arrays"] | one["arrays"] for one in (own, own["random"]))
    for name, variables in _variables(objects).items():
        names = shared["names"].get(name, [])
        if len(variables) != len(names):
            raise ValueError(
                f"{name} must have the {len(names)} variables that were saved, got {len(variables)}; call "
                f"{name}.build(...) before, or use the same {name}"
            )
        for number, (variable, saved) in enumerate(zip(variables, names, strict=True)):
            is_generator = name_of(variable).rsplit("/", 1)[-1] in _GENERATORS
            dtype = np.dtype(plain(variable).dtype.as_numpy_dtype)
            array = viewed((generators if is_generator else arrays)[f"{name}/{number}"], dtype)
            # An optimizer names its variables after the model's, and otherwise when it has been loaded.
            is_same = _is_optimizer(objects[name]) or same_name(saved, name_of(variable))
            if (array.shape, array.dtype) != (tuple(variable.shape), dtype) or not is_same:
                raise ValueError(
                    f"variable {number} of {name} must be {saved!r} with shape {array.shape} and dtype {array.dtype}, got "
                    f"{name_of(variable)!r} with {tuple(variable.shape)} and {dtype}; use the same {name}"
                )
            plain(variable).assign(array)
    for name, compressor in _compressors(objects).items():
        compressor.load_state_dict(own["compression"][name])
    set_random_state(own["random"]["host"])


def _variables(objects: Objects) -> dict[str, list[Variable]]:
    found = {name: _variables_of(one) for name, one in objects.items()}
    return {name: variables for name, variables in found.items() if variables is not None}


def _variables_of(one: Any) -> list[Variable] | None:
    """Return the variables of an object, always in the same order; None if it is a plain value."""
    if isinstance(one, TensorflowCompressor):
        return []
    if isinstance(one, tf.random.Generator):
        return [one.state]
    if isinstance(plain(one), tf.Variable):
        return [one]
    variables = getattr(one, "variables", None)
    return variables if variables is None else list(variables() if callable(variables) else variables)


def _is_shared(one: Any, variable: Variable, local: frozenset[Any]) -> bool:
    """Return whether a variable has the same value on every rank."""
    if _is_optimizer(one):
        # What an optimizer keeps of a local variable has no mark of its own. One whose updates are exchanged has seen the
        # gradients of its own rank.
        return not local and getattr(_distributed(one).reducer, "updates", None) is None
    return bool(variable.trainable) and plain(variable).ref() not in local


def _is_optimizer(one: Any) -> bool:
    return hasattr(one, "apply_gradients")


def _distributed(one: Any) -> Any:
    """Return what makes a Keras 3 optimizer distributed (`keras.optimizer.DistributedApply`).

    Keras takes seconds to import, and a tape does not need it. So the class is not named here.
    """
    apply = getattr(getattr(one, "inner_optimizer", one), "apply", None)
    return apply if hasattr(apply, "local_variables") else _NOT_DISTRIBUTED


def passes_of(one: Any) -> int:
    """Return the number of passes whose gradients an optimizer has summed and not yet applied."""
    return int(_distributed(one).passes_under_way)


checkpoints = Checkpoints(_workers, _compressors, _own, _shared, _decode, _check, _set, passes_of)
save_checkpoint, load_checkpoint = checkpoints.save_checkpoint, checkpoints.load_checkpoint
