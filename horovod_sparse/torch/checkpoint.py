"""Checkpoints of a whole training: model, optimizer, residuals, random numbers, and whatever else a rank keeps.

Files are read with `torch.load(weights_only=True)`, which runs no code from them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch import Generator, nn

from horovod_sparse.core.checkpoint import Checkpoints, Objects, State, Workers, random_state, set_random_state
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.encoding import decode, encode
from horovod_sparse.torch.exchange import gather_json
from horovod_sparse.torch.reducer import Reducer, reducer_of


def _workers() -> Workers:
    gather = partial(gather_json, name="horovod_sparse.checkpoint", process_set=mpi_ops.global_process_set)
    return Workers(mpi_ops.rank(), mpi_ops.size(), gather)


def _compressors(objects: Objects) -> dict[str, TorchCompressor]:
    found = {name: getattr(one, "_compression", None) for name, one in objects.items()}
    return {name: compressor for name, compressor in found.items() if isinstance(compressor, TorchCompressor)}


def _shared(objects: Objects) -> bytes:
    return encode({name: _state_of(one) for name, one in objects.items() if _is_shared(one)})


def _own(objects: Objects) -> bytes:
    random = {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all(), "host": random_state()}
    return encode(
        {
            "random": random,
            "buffers": {name: _buffers(one) for name, one in objects.items() if isinstance(one, nn.Module)},
            "compression": {name: compressor.state_dict() for name, compressor in _compressors(objects).items()},
            "own": {name: _state_of(one) for name, one in objects.items() if not _is_shared(one)},
        }
    )


def _is_shared(one: object) -> bool:
    # An optimizer whose updates are exchanged has seen the gradients of its own rank.
    reducer = reducer_of(one)
    return isinstance(one, (nn.Module, torch.optim.Optimizer)) and (reducer is None or reducer.updates is None)


def _state_of(one: Any) -> Any:
    if isinstance(one, Generator):
        return one.get_state()
    return one.state_dict() if hasattr(one, "state_dict") else one


def _buffers(model: nn.Module) -> State:
    return {name: model.state_dict()[name] for name, _ in model.named_buffers() if name in model.state_dict()}


def _check(objects: Objects, shared: State, own: State) -> tuple[set[str], State]:
    for name, one in objects.items():
        if not isinstance(one, Generator) and not hasattr(one, "load_state_dict"):
            raise ValueError(
                f"{name} must have load_state_dict, got {type(one).__name__}; leave it out and find it in values"
            )
    for compressor in _compressors(objects).values():
        if isinstance(compressor.store, Reducer):
            # The state of before a step that goes on would lack what is on its way.
            compressor.store.give_up()
    saved = {**shared, **own["own"]}
    return {*saved}, saved


def _set(objects: Objects, shared: State, own: State) -> None:
    saved = {**shared, **own["own"]}
    for name, one in objects.items():
        if isinstance(one, Generator):
            one.set_state(saved[name])
            continue
        one.load_state_dict(saved[name])
        if isinstance(one, nn.Module):
            one.load_state_dict(own["buffers"][name], strict=False)
    for name, compressor in _compressors(objects).items():
        compressor.load_state_dict(own["compression"][name])
    # This comes last, because loading may draw some.
    torch.set_rng_state(own["random"]["torch"])
    if len(own["random"]["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(own["random"]["cuda"])
    set_random_state(own["random"]["host"])


checkpoints = Checkpoints(_workers, _compressors, _own, _shared, decode, _check, _set)
save_checkpoint, load_checkpoint = checkpoints.save_checkpoint, checkpoints.load_checkpoint
