"""Checkpoints of a whole training: model, optimizer, residuals, random numbers, and whatever else a rank keeps.

Files are read with `torch.load(weights_only=True)`, which runs no code from them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.core import checkpoint
from horovod_sparse.core.checkpoint import Checkpoint, Damaged, Folder, Loaded, Workers
from horovod_sparse.core.randomness import random_state, set_random_state
from horovod_sparse.core.state import joined
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.encoding import decode, encode, mapped
from horovod_sparse.torch.exchange import gather_json
from horovod_sparse.torch.reducer import Reducer, reducer_of

_SHARED = (torch.nn.Module, torch.optim.Optimizer)
"""Whose state is the same on every rank, where gradients are exchanged."""


def save_checkpoint(folder: Folder, step: int, *, keep: int = 3, **objects: Any) -> None:
    """Save a checkpoint from which training continues bit for bit. Call it on every rank, between two steps.

    It holds `objects`, the residuals and the adaptive state of the optimizers' compressors, and the states of the random
    generators of PyTorch, NumPy and Python. The models and optimizers of rank 0 are saved for all ranks. Buffers of models
    (running means), optimizers whose updates are exchanged, and everything else are saved for every rank. Numbers of NumPy's
    become Python's. Blocks until the checkpoint is on the disk.

    Args:
        folder: the folder of all checkpoints of this job, on a file system that all hosts share.
        step: number of steps that are done, >= 0.
        keep: how many checkpoints are kept, >= 1. Older ones are removed when this one is complete.
        **objects: what to save, by name: whatever has `state_dict` and `load_state_dict` (model, optimizer, scheduler,
            sampler, scaler), `torch.Generator`s, tensors, and plain values.

    Raises:
        TypeError, ValueError: `step` or `keep` is wrong, `step` differs between ranks, or something has a type that
            `torch.load(weights_only=True)` refuses. Ranks on which that is not so raise RuntimeError.
        RuntimeError: on every rank, if one cannot write, or another job saves in the folder. Older checkpoints stay.
    """
    own, shared = (lambda: encode(_own_state(objects))), (lambda: encode(_states(objects, shared=True)))
    checkpoint.save(folder, step, keep, _workers(), own, shared, decode)


def load_checkpoint(folder: Folder, *, damaged: Damaged = "skip", **objects: Any) -> Checkpoint:
    """Load the newest complete checkpoint into `objects`. Call it on every rank, after the optimizers have been wrapped.

    If there is no checkpoint, nothing changes and `step` is 0. If the number of workers differs from when it was saved, the
    sum of the residuals over all workers is kept: residuals of workers that are gone are added to those of others, and new
    workers begin with zero. A warning says so.

    Args:
        folder: the folder of all checkpoints.
        damaged: what happens if a file is missing or was changed: "skip" takes an older checkpoint and warns, "raise" raises.
        **objects: what to load, by the names that `save_checkpoint` was given. What is left out is returned in `values`.

    Raises:
        ValueError: `damaged` is neither.
        RuntimeError: on every rank, if there are checkpoints and none can be read, if the newest is damaged and
            damaged="raise", or if it does not fit the objects. These are then as before.
    """
    return checkpoint.restore(folder, _workers(), damaged, lambda found: _loading(found, objects))


@contextlib.contextmanager
def _loading(found: Loaded, objects: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Load what was saved into the objects, and yield the rest. Undo it if this or the context raises.

    Whether an object takes a state is known only when it has been loaded: a module loads what fits, and raises then.
    """
    parts = [decode(own) for own in found.own]
    state = parts[0]
    saved = {**decode(found.shared), **state["own"]}
    unknown = sorted(objects.keys() - saved.keys())
    if unknown:
        raise ValueError(f"{unknown} were not saved; it holds {sorted(saved)}")
    for name, one in objects.items():
        if not isinstance(one, torch.Generator) and not hasattr(one, "load_state_dict"):
            raise ValueError(
                f"{name} must have load_state_dict, got {type(one).__name__}; leave it out and find it in values"
            )
    for name, compressor in _compressors(objects).items():
        if isinstance(compressor.store, Reducer):
            # The state of before a step that goes on would lack what is on its way.
            compressor.store.give_up()
        if name not in state["compression"]:
            raise ValueError(f"{name} was saved without a compressor, but has {compressor!r} now")
        state["compression"][name] = joined([part["compression"][name] for part in parts], zero=found.is_new)
    now = {**_own_state(objects), "own": {name: _state_of(one) for name, one in objects.items()}}
    before = mapped(now, lambda _, one: one.to("cpu", copy=True) if isinstance(one, Tensor) else one)
    if found.is_new:
        # A new worker would draw the same random numbers as the one whose file it reads.
        state["random"] = before["random"]
    try:
        _set_state(objects, {**state, "own": saved})
        yield {name: one for name, one in saved.items() if name not in objects}
    except BaseException:
        _set_state(objects, before)
        raise


def _own_state(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "random": _random_state(),
        "buffers": {name: _buffers(one) for name, one in objects.items() if isinstance(one, torch.nn.Module)},
        "compression": {name: compressor.state_dict() for name, compressor in _compressors(objects).items()},
        "own": _states(objects, shared=False),
    }


def _states(objects: Mapping[str, Any], *, shared: bool) -> dict[str, Any]:
    """Return the states of the objects that have the same one on every rank, or of the others."""
    return {name: _state_of(one) for name, one in objects.items() if shared == _is_shared(one)}


def _is_shared(one: object) -> bool:
    # An optimizer whose updates are exchanged has seen the gradients of its own rank.
    reducer = reducer_of(one)
    return isinstance(one, _SHARED) and (reducer is None or reducer.updates is None)


def _set_state(objects: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    for name, one in objects.items():
        if isinstance(one, torch.Generator):
            one.set_state(state["own"][name])
            continue
        one.load_state_dict(state["own"][name])
        if isinstance(one, torch.nn.Module):
            one.load_state_dict(state["buffers"][name], strict=False)
    for name, compressor in _compressors(objects).items():
        compressor.load_state_dict(state["compression"][name])
    # This comes last, because loading may draw some.
    _set_random_state(state["random"])


def _workers() -> Workers:
    gather = partial(gather_json, name="horovod_sparse.checkpoint", process_set=mpi_ops.global_process_set)
    return Workers(mpi_ops.rank(), mpi_ops.size(), gather)


def _compressors(objects: Mapping[str, Any]) -> dict[str, TorchCompressor]:
    found = {name: getattr(one, "_compression", None) for name, one in objects.items()}
    return {name: compressor for name, compressor in found.items() if isinstance(compressor, TorchCompressor)}


def _state_of(one: Any) -> Any:
    if isinstance(one, torch.Generator):
        return one.get_state()
    return one.state_dict() if hasattr(one, "state_dict") else one


def _buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: model.state_dict()[name] for name, _ in model.named_buffers() if name in model.state_dict()}


def _random_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "host": random_state(),
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    set_random_state(state["host"])
