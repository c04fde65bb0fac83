"""Makes an optimizer and its parameters on some ranks equal to those of another rank."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch import Tensor


def broadcast_optimizer(
    optimizer: Any, scaler: torch.amp.GradScaler | None, root: int, name: str, *, is_behind: bool
) -> None:
    """Copy the parameters and the state of an optimizer, and the state of its loss scaler, from rank `root`. Blocks.

    Unlike `hvd.broadcast_optimizer_state` it never calls `step`, it takes any optimizer, and it copies learning rates even if
    there is nothing else to copy. `name` begins the collectives' names. Ranks that are not behind load no state.
    """
    process_set, is_root = optimizer.process_set, mpi_ops.rank() == root
    state = {"optimizer": optimizer.state_dict(), "scaler": None if scaler is None else scaler.state_dict()}
    tensors: list[Tensor] = []

    def put_aside(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor
        tensors.append(tensor.cpu())
        return tensor.to("meta")

    def make_room(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        tensors.append(torch.empty(tensor.shape, dtype=tensor.dtype))
        return tensors[-1]

    frame = encode(_with_tensors(state, put_aside)) if is_root else b""
    frame = _broadcast_bytes(frame, root, name, process_set)
    if not is_root:
        state = _with_tensors(torch.load(io.BytesIO(frame), weights_only=True), make_room)
    parameters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    _broadcast_tensors([*tensors, *parameters], root, name, process_set)
    if is_behind:
        optimizer.load_state_dict(state["optimizer"])
        if scaler is not None:
            scaler.load_state_dict(state["scaler"])


def _with_tensors(state: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a state with other tensors."""
    if isinstance(state, Tensor):
        return replace(state)
    if isinstance(state, dict):
        return {key: _with_tensors(value, replace) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_with_tensors(value, replace) for value in state)
    return state


def encode(state: Any) -> bytes:
    """Return what `torch.load` reads."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _broadcast_bytes(content: bytes, root: int, name: str, process_set: Any) -> bytes:
    length = mpi_ops.broadcast(torch.tensor([len(content)]), root, f"{name}.length", process_set=process_set)
    message = torch.zeros(int(length), dtype=torch.uint8)
    if mpi_ops.rank() == root:
        message = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    received: bytes = mpi_ops.broadcast(message, root, f"{name}.frame", process_set=process_set).numpy().tobytes()
    return received


def _broadcast_tensors(tensors: Iterable[Tensor], root: int, name: str, process_set: Any) -> None:
    """Broadcast tensors in place. Each goes in one dimension; Horovod does not know bfloat16."""
    under_way = []
    for number, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        flat = tensor.reshape(-1)
        wire = flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat
        handle = mpi_ops.broadcast_async_(wire, root, f"{name}.{number}", process_set=process_set)
        under_way.append((tensor, flat, handle))
    for tensor, flat, handle in under_way:
        mpi_ops.synchronize(handle)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
