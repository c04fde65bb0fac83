"""Checkpoints of training on NumPy arrays: arrays, residuals and plain values. Does not import mpi4py.

Files hold NumPy arrays and JSON (`core.packing`). Reading them runs no code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.core import checkpoint
from horovod_sparse.core.checkpoint import Checkpoint, Damaged, Folder, Loaded, Workers
from horovod_sparse.core.packing import check_plain, pack, packed_state, unpack, unpacked_state, viewed
from horovod_sparse.core.state import joined
from horovod_sparse.numpy.allreduce import SparseAllreduce

Array = NDArray[Any]

_STATE = "allreduce/state"


def save_checkpoint(
    folder: Folder,
    step: int,
    comm: Any,
    allreduce: SparseAllreduce | None,
    arrays: Mapping[str, Array],
    *,
    keep: int = 3,
    **values: Any,
) -> None:
    """Save a checkpoint from which training continues bit for bit. Call it on every worker, between two steps.

    Blocks until the checkpoint is on the disk.

    Args:
        folder: the folder of all checkpoints of this job, on a file system that all hosts share.
        step: number of steps that are done, >= 0.
        comm: the workers' mpi4py communicator; None for a single worker.
        allreduce: what holds the residuals; None if there are none.
        arrays: what is the same on all workers, such as weights, by name. Worker 0's arrays are saved.
        keep: how many checkpoints are kept, >= 1. Older ones are removed when this one is complete.
        **values: what is this worker's own, such as `generator.bit_generator.state`: values that JSON can express.

    Raises:
        TypeError, ValueError: `step` or `keep` is wrong, `step` differs between workers, an array holds objects, or JSON cannot
            express a value. Workers on which that is not so raise RuntimeError.
        RuntimeError: on every worker, if one cannot write, or another job saves in the folder. Older checkpoints stay.
    """

    def own() -> bytes:
        for name, value in values.items():
            check_plain(name, value)
        state: dict[str, Array] = {}
        if allreduce is not None:
            state[_STATE] = np.frombuffer(packed_state(allreduce.state_dict()), np.uint8)
        return pack(state, values)

    def shared() -> bytes:
        known = {} if allreduce is None else allreduce.shapes
        shapes = [(name, shape, str(dtype)) for name, (shape, dtype) in known.items()]
        held = {f"arrays/{name}": np.asarray(array) for name, array in arrays.items()}
        return pack(held, {"gradients": shapes})

    checkpoint.save(folder, step, keep, _workers(comm), own, shared, unpack)


def load_checkpoint(
    folder: Folder,
    comm: Any,
    allreduce: SparseAllreduce | None,
    arrays: Mapping[str, Array],
    *,
    damaged: Damaged = "skip",
) -> Checkpoint:
    """Load the newest complete checkpoint into `allreduce` and `arrays`. Call it on every worker, before the first step.

    If there is none, nothing changes and `step` is 0. If the number of workers has changed, the sum of the residuals is kept,
    a warning says so, and new workers get the values of another.

    Args:
        folder: the folder of all checkpoints.
        comm: the workers' mpi4py communicator; None for a single worker.
        allreduce: what gets the residuals; None if none were saved.
        arrays: arrays with the names, shapes and types of those that were saved. They are overwritten.
        damaged: what happens if a file is missing or was changed: "skip" takes an older checkpoint and warns, "raise" raises.

    Raises:
        ValueError: `damaged` is neither.
        RuntimeError: on every worker, if there are checkpoints and none can be read, if the newest is damaged and
            damaged="raise", or if it does not fit. Nothing changes then.
    """
    return checkpoint.restore(folder, _workers(comm), damaged, lambda found: _loading(found, allreduce, arrays))


@contextlib.contextmanager
def _loading(found: Loaded, allreduce: SparseAllreduce | None, arrays: Mapping[str, Array]) -> Iterator[dict[str, Any]]:
    """Check that a checkpoint fits, yield the values, and load the rest when all workers have agreed."""
    held, described = unpack(found.shared)
    own = [unpack(one) for one in found.own]
    saved = {name.removeprefix("arrays/"): array for name, array in held.items()}
    saved |= {name: viewed(saved[name], one.dtype) for name, one in arrays.items() if name in saved}
    if {n: (a.shape, a.dtype) for n, a in saved.items()} != {n: (a.shape, a.dtype) for n, a in arrays.items()}:
        raise ValueError(
            f"arrays must be like those that were saved, {_described(saved)}, got {_described(arrays)}; use the same ones"
        )
    fixed = [name for name, array in arrays.items() if not array.flags.writeable]
    if fixed:
        raise ValueError(f"arrays must be writeable, got read-only ones: {fixed}; copy them")
    if (_STATE in own[0][0]) != (allreduce is not None):
        expected = "a SparseAllreduce" if allreduce is None else "None"
        raise ValueError(f"allreduce must be {expected}, as when the checkpoint was saved, got {allreduce!r}")
    gradients = {name: np.zeros(shape, dtype) for name, shape, dtype in described["gradients"]}
    if allreduce is not None:
        state = joined([unpacked_state(one[_STATE].tobytes()) for one, _ in own], zero=found.is_new)
        allreduce.check_state(state, gradients)
    yield own[0][1]
    if allreduce is not None and gradients:
        allreduce.load_state_dict(state, gradients)
    for name, array in saved.items():
        arrays[name][...] = array


def _described(arrays: Mapping[str, Array]) -> dict[str, str]:
    return {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}


def _workers(comm: Any) -> Workers:
    if comm is None:
        return Workers(0, 1, lambda value: [value])
    return Workers(comm.Get_rank(), comm.Get_size(), comm.allgather)
