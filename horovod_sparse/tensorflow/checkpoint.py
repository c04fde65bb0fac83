"""Checkpoints of a whole training: variables of models and optimizers, residuals, random numbers, and plain values.

Files hold NumPy arrays and JSON (`packing`). Reading them runs no code.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from numpy.typing import NDArray

from horovod_sparse.core import checkpoint
from horovod_sparse.core.checkpoint import Checkpoint, Damaged, Folder, Loaded, Workers
from horovod_sparse.core.packing import check_plain, pack, unpack, unpacked_state, viewed
from horovod_sparse.core.randomness import random_state, set_random_state
from horovod_sparse.core.state import joined
from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.exchange import gather_json
from horovod_sparse.tensorflow.names import name_of, plain, same_name

Variable = Any

_GENERATORS = ("seed_generator_state", "StateVar")
"""Names of the variables in which Keras and TensorFlow keep the states of random generators."""


def save_checkpoint(folder: Folder, step: int, *, keep: int = 3, **objects: Any) -> None:
    """Save a checkpoint from which training continues bit for bit. Call it on every rank, between two steps.

    It holds `objects`, the residuals and the adaptive state of the optimizers' compressors, and the states of the random
    generators of NumPy and Python. Trainable variables and optimizers of rank 0 are saved for all ranks. Everything else
    (running means, states of random generators) is saved for every rank. Blocks until the checkpoint is on the disk.

    Args:
        folder: the folder of all checkpoints of this job, on a file system that all hosts share.
        step: number of steps that are done, >= 0.
        keep: how many checkpoints are kept, >= 1. Older ones are removed when this one is complete.
        **objects: what to save, by name: models, optimizers and whatever else has `variables`, variables,
            `tf.random.Generator`s, compressors, and values that JSON can express. The compressor of a Keras 3 optimizer is
            saved with it; those of tapes and other optimizers must be among the objects.

    Raises:
        TypeError, ValueError: `step` or `keep` is wrong, `step` differs between ranks, gradients of several passes are being
            summed, or an object cannot be saved. Ranks on which that is not so raise RuntimeError.
        RuntimeError: on every rank, if one cannot write, or another job saves in the folder. Older checkpoints stay.
    """
    checkpoint.save(folder, step, keep, _workers(), lambda: _own(objects), lambda: _shared(objects), unpack)


def _own(objects: Mapping[str, Any]) -> bytes:
    arrays, values = _arrays(objects, shared=False), {}
    for name, one in objects.items():
        if passes_of(one):
            raise ValueError(
                f"{name} must be between two steps, but sums the gradients of {passes_of(one)} passes that it has not applied; "
                "save after the last of them"
            )
        if _variables_of(one) is None and not isinstance(one, TensorflowCompressor):
            check_plain(name, one)
            values[name] = one
    for name, compressor in _compressors(objects).items():
        arrays[f"{name}/state"] = np.frombuffer(compressor.serialize(), np.uint8)
    return pack(arrays, {"values": values, "random": random_state()})


def _shared(objects: Mapping[str, Any]) -> bytes:
    of = {name: variables for name, one in objects.items() if (variables := _variables_of(one)) is not None}
    names = {name: [name_of(variable) for variable in variables] for name, variables in of.items()}
    return pack(_arrays(objects, shared=True), {"names": names})


def _arrays(objects: Mapping[str, Any], *, shared: bool) -> dict[str, NDArray[Any]]:
    """Return the values of the variables that have the same one on every rank, or of the others, by object and number."""
    local, arrays = _local_variables(objects), {}
    for name, one in objects.items():
        for number, variable in enumerate(_variables_of(one) or ()):
            if _dtype(variable).hasobject:
                raise ValueError(f"variable {name_of(variable)!r} must hold numbers, got {plain(variable).dtype.name}")
            if shared == _is_shared(one, variable, local):
                arrays[f"{name}/{number}"] = plain(variable).numpy()
    return arrays


def load_checkpoint(folder: Folder, *, damaged: Damaged = "skip", **objects: Any) -> Checkpoint:
    """Load the newest complete checkpoint into `objects`. Call it on every rank, when all variables have been made.

    If there is no checkpoint, nothing changes and `step` is 0. If the number of workers differs from when it was saved, the
    sum of the residuals over all workers is kept: residuals of workers that are gone are added to those of others, and new
    workers begin with zero. A warning says so.

    Args:
        folder: the folder of all checkpoints.
        damaged: what happens if a file is missing or was changed: "skip" takes an older checkpoint and warns, "raise" raises.
        **objects: what to load, by the names that `save_checkpoint` was given. Plain values are returned in `values`.

    Raises:
        ValueError: `damaged` is neither.
        RuntimeError: on every rank, if there are checkpoints and none can be read, if the newest is damaged and
            damaged="raise", or if it does not fit the objects. These are then as before.
    """
    return checkpoint.restore(folder, _workers(), damaged, lambda found: _loading(found, objects))


@contextlib.contextmanager
def _loading(found: Loaded, objects: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Load the compressors, yield the values, and load the rest when all ranks have agreed."""
    arrays, described = unpack(found.shared)
    parts = [unpack(own) for own in found.own]
    arrays |= parts[0][0]
    assignments = [
        assignment
        for name, one in objects.items()
        for assignment in _assignments(name, one, described["names"], arrays)
    ]
    compressors, states = _compressors(objects), {}
    for name, compressor in compressors.items():
        if f"{name}/state" not in arrays:
            raise ValueError(f"{name} was saved without a compressor, but has {compressor!r} now")
        own = [unpacked_state(part[f"{name}/state"].tobytes()) for part, _ in parts]
        states[name] = joined(own, zero=found.is_new)
    before = {name: copy.deepcopy(compressor.state_dict()) for name, compressor in compressors.items()}
    try:
        for name, compressor in compressors.items():
            compressor.load_state_dict(states[name])
        yield parts[0][1]["values"]
    except BaseException:
        for name, compressor in compressors.items():
            compressor.load_state_dict(before[name])
        raise
    for variable, array in assignments:
        # A new worker would draw the same random numbers as the one whose file it reads.
        if not (found.is_new and name_of(variable).rsplit("/", 1)[-1] in _GENERATORS):
            variable.assign(array)
    if not found.is_new:
        set_random_state(parts[0][1]["random"])


def _assignments(
    name: str, one: Any, names: Mapping[str, list[str]], arrays: Mapping[str, NDArray[Any]]
) -> Iterator[tuple[Variable, NDArray[Any]]]:
    """Yield each variable of an object with the array that was saved of it."""
    variables = _variables_of(one)
    if variables is None:
        if not isinstance(one, TensorflowCompressor):
            raise ValueError(
                f"{name} must have variables, got {type(one).__name__}; leave it out and find it in values"
            )
        return
    if name not in names:
        raise ValueError(f"{name} was not saved; it holds the variables of {sorted(names)}")
    if len(variables) != len(names[name]):
        raise ValueError(
            f"{name} must have the {len(names[name])} variables that were saved, got {len(variables)}; call "
            f"{name}.build(...) before, or use the same {name}"
        )
    for number, variable in enumerate(variables):
        dtype, saved = _dtype(variable), names[name][number]
        array = viewed(arrays[f"{name}/{number}"], dtype)
        # An optimizer names its variables after the model's, and otherwise when it has been loaded.
        is_same = _is_optimizer(one) or same_name(saved, name_of(variable))
        if (array.shape, array.dtype) != (tuple(variable.shape), dtype) or not is_same:
            raise ValueError(
                f"variable {number} of {name} must be {saved!r} with shape {array.shape} and dtype {array.dtype}, got "
                f"{name_of(variable)!r} with {tuple(variable.shape)} and {dtype}; use the same {name}"
            )
        yield plain(variable), array


def _workers() -> Workers:
    gather = partial(gather_json, name="horovod_sparse.checkpoint", process_set=mpi_ops.global_process_set)
    return Workers(mpi_ops.rank(), mpi_ops.size(), gather)


def _variables_of(one: Any) -> list[Variable] | None:
    """Return the variables of an object, always in the same order; None if it is no such object."""
    if isinstance(one, TensorflowCompressor):
        return None
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
        store = getattr(getattr(_distributed(one), "compression", None), "store", None)
        return not local and (store is None or store.updates is None)
    return bool(variable.trainable) and plain(variable).ref() not in local


def _is_optimizer(one: Any) -> bool:
    return hasattr(one, "apply_gradients")


def _distributed(one: Any) -> Any:
    """Return what makes a Keras 3 optimizer distributed (`keras.optimizer.DistributedApply`), or None.

    Keras takes seconds to import, and a tape does not need it. So the class is not named here.
    """
    inside = getattr(one, "inner_optimizer", None)
    found = [getattr(optimizer, "apply", None) for optimizer in (one, inside) if _is_optimizer(optimizer)]
    return next((apply for apply in found if hasattr(apply, "local_variables")), None)


def _local_variables(objects: Mapping[str, Any]) -> frozenset[Any]:
    """Return the variables whose gradients are not reduced, so that they differ between ranks."""
    found = (getattr(_distributed(one), "local_variables", ()) for one in objects.values())
    return frozenset(variable for variables in found for variable in variables)


def passes_of(one: Any) -> int:
    """Return the number of passes whose gradients an optimizer has summed and not yet applied."""
    return getattr(_distributed(one), "passes_under_way", 0)


def _compressors(objects: Mapping[str, Any]) -> dict[str, TensorflowCompressor]:
    found = {name: getattr(_distributed(one), "compression", one) for name, one in objects.items()}
    # That of an optimizer may have been given as well.
    given = {id(one) for one in objects.values()}
    return {
        name: one
        for name, one in found.items()
        if isinstance(one, TensorflowCompressor) and (one is objects[name] or id(one) not in given)
    }


def _dtype(variable: Variable) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(plain(variable).dtype.as_numpy_dtype)
    return dtype
