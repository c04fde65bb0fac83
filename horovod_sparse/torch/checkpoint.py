"""Checkpoints of a whole training: model, optimizer, residuals, random numbers, and whatever else a rank keeps.

Files are read with `torch.load(weights_only=True)`, which runs no code from them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.core import checkpoint
from horovod_sparse.core.checkpoint import Checkpoint, Damaged, Loaded, Workers
from horovod_sparse.core.randomness import random_state, set_random_state
from horovod_sparse.core.state import joined
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.exchange import gather_json
from horovod_sparse.torch.replicas import encode

_COLLECTIVE = "horovod_sparse.checkpoint"


def save_checkpoint(folder: str | os.PathLike[str], step: int, *, keep: int = 3, **objects: Any) -> None:
    """Save a checkpoint from which training continues bit for bit. Call it on every rank, between two steps.

    It holds `objects`, the residuals and the adaptive state of the optimizers' compressors, and the states of the random
    generators of PyTorch, NumPy and Python. The models and optimizers of rank 0 are saved for all ranks. Buffers of models
    (running means) and everything else are saved for every rank. Blocks until the checkpoint is on the disk.

    Args:
        folder: the folder of all checkpoints, on a file system that all hosts share.
        step: number of steps that are done.
        keep: how many checkpoints are kept, >= 1. Older ones are removed when this one is complete.
        **objects: what to save, by name: whatever has `state_dict` and `load_state_dict` (model, optimizer, scheduler,
            sampler, scaler), `torch.Generator`s, tensors, and plain values.

    Raises:
        ValueError: `keep` is below 1, or `step` differs between ranks.
        RuntimeError: on every rank, if a rank could not write its file. Older checkpoints are not touched.
    """
    shared = {name: _state_of(one) for name, one in objects.items() if _is_shared(one)}
    own = {
        "random": _random_state(),
        "buffers": {name: _buffers(one) for name, one in objects.items() if isinstance(one, torch.nn.Module)},
        "compression": {name: compressor.state_dict() for name, compressor in _compressors(objects).items()},
        "own": {name: _state_of(one) for name, one in objects.items() if not _is_shared(one)},
    }
    workers = _workers()
    checkpoint.save(Path(folder), step, encode(own), encode(shared) if workers.rank == 0 else None, workers, keep)


def load_checkpoint(folder: str | os.PathLike[str], *, damaged: Damaged = "skip", **objects: Any) -> Checkpoint:
    """Load the newest complete checkpoint into `objects`. Call it on every rank, after the optimizers have been wrapped.

    If there is no checkpoint, nothing changes and `step` is 0. If the number of workers differs from when it was saved, the
    sum of the residuals over all workers is kept: residuals of workers that are gone are added to those of others, and new
    workers begin with zero. A warning says so.

    Args:
        folder: the folder of all checkpoints.
        damaged: what happens if a file is missing or was changed: "skip" takes an older checkpoint and warns, "raise" raises.
        **objects: what to load, by the names that `save_checkpoint` was given. What is left out is returned in `values`.

    Raises:
        ValueError: `damaged` is neither, or an object was not saved.
        RuntimeError: on every rank, if the checkpoint does not fit the objects, or is damaged and damaged="raise".
    """
    return checkpoint.restore(Path(folder), _workers(), damaged, lambda found: _load(found, objects))


def _load(found: Loaded, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Load what was saved into the objects, and return the rest."""
    shared, own = _decode(found.shared), [_decode(part) for part in found.own]
    first = own[0]
    saved = {**shared, **first["own"]}
    unknown = sorted(objects.keys() - saved.keys())
    if unknown:
        raise ValueError(f"{unknown} were not saved; it holds {sorted(saved)}")
    rest = {name: state for name, state in saved.items() if name not in objects}
    for name, one in objects.items():
        _set_state(name, one, saved[name])
        if isinstance(one, torch.nn.Module):
            one.load_state_dict(first["buffers"][name], strict=False)
    is_new = mpi_ops.rank() >= found.world
    for name, compressor in _compressors(objects).items():
        if name not in first["compression"]:
            raise ValueError(f"{name} was saved without a compressor, but has {compressor!r} now")
        compressor.load_state_dict(joined([part["compression"][name] for part in own], zero=is_new))
    if not is_new:
        # A new worker would draw the same random numbers as the one whose file it reads. This comes last, because loading may
        # draw some.
        _set_random_state(first["random"])
    return rest


def _workers() -> Workers:
    def gather(value: Any) -> list[Any]:
        return gather_json(value, _COLLECTIVE, mpi_ops.global_process_set)

    return Workers(mpi_ops.rank(), mpi_ops.size(), gather)


def _compressors(objects: Mapping[str, Any]) -> dict[str, TorchCompressor]:
    found = {name: getattr(one, "_compression", None) for name, one in objects.items()}
    return {name: compressor for name, compressor in found.items() if isinstance(compressor, TorchCompressor)}


def _is_shared(one: Any) -> bool:
    """Return whether an object has the same state on every rank."""
    return isinstance(one, (torch.nn.Module, torch.optim.Optimizer))


def _state_of(one: Any) -> Any:
    if isinstance(one, torch.Generator):
        return one.get_state()
    return one.state_dict() if hasattr(one, "state_dict") else one


def _set_state(name: str, one: Any, state: Any) -> None:
    if isinstance(one, torch.Generator):
        one.set_state(state)
    elif hasattr(one, "load_state_dict"):
        one.load_state_dict(state)
    else:
        raise ValueError(
            f"{name} must have load_state_dict, got {type(one).__name__}; leave it out and find it in values"
        )


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


def _decode(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
