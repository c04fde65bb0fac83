"""Checkpoints of a whole training: model, optimizer, residuals, random numbers, and whatever else a rank keeps.

Files are read with `torch.load(weights_only=True)`, which runs no code from them.
"""

from __future__ import annotations

import io
import os
import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.core import checkpoint
from horovod_sparse.core.checkpoint import Damaged, Workers
from horovod_sparse.core.state import joined
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.exchange import gather_json

_COLLECTIVE = "horovod_sparse.checkpoint"


class Checkpoint(NamedTuple):
    """What `load_checkpoint` found."""

    step: int
    """Number of steps that were done; 0 if there is no checkpoint."""
    values: dict[str, Any]
    """What was saved under names that were not given to `load_checkpoint`."""


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
    if keep < 1:
        raise ValueError(f"keep must be >= 1, got {keep}; every call saves a checkpoint that is kept")
    shared = {name: _state_of(one) for name, one in objects.items() if _is_shared(one)}
    own = {
        "random": _random_state(),
        "buffers": {name: _buffers(one) for name, one in objects.items() if isinstance(one, torch.nn.Module)},
        "compression": {name: compressor.state_dict() for name, compressor in _compressors(objects).items()},
        "own": {name: _state_of(one) for name, one in objects.items() if not _is_shared(one)},
    }
    workers = _workers()
    checkpoint.save(Path(folder), step, _encode(own), _encode(shared) if workers.rank == 0 else None, workers, keep)


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
    if damaged not in ("skip", "raise"):
        raise ValueError(f"damaged must be 'skip' or 'raise', got {damaged!r}")
    workers = _workers()
    found = checkpoint.load(Path(folder), workers, damaged)
    if found is None:
        return Checkpoint(0, {})
    if found.world != workers.size and workers.rank == 0:
        warnings.warn(
            f"horovod_sparse: {found.world} workers saved the checkpoint of step {found.step}, {workers.size} continue; the "
            "sum of their residuals is kept",
            stacklevel=2,
        )
    values, problem = {}, ""
    try:
        values = _load(_decode(found.shared), [_decode(own) for own in found.own], objects, found.world)
    except Exception as error:
        problem = f"the checkpoint of step {found.step} does not fit: {error}"
    workers.agree(problem)
    return Checkpoint(found.step, values)


def _load(
    shared: Mapping[str, Any], own: list[dict[str, Any]], objects: Mapping[str, Any], world: int
) -> dict[str, Any]:
    """Load what was saved into the objects, and return the rest."""
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
    is_new = mpi_ops.rank() >= world
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
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _encode(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _decode(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
