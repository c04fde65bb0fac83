"""Makes tensors and optimizers on some ranks equal to those of another rank, whatever their types and memory layouts are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.torch.encoding import decode, encode, mapped

_WIRE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What entries are sent as, by their size in bytes: Horovod knows neither bfloat16 nor complex numbers."""
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def broadcast_parameters(params: Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]], root_rank: int) -> None:
    """Copy tensors from rank `root_rank` to all others, in place. Blocks.

    This replaces Horovod's function, which refuses bfloat16 and tensors that are not contiguous, such as channels_last.

    Args:
        params: `model.state_dict()`, or the tensors with or without their names; the same on all ranks.
        root_rank: the rank that has the right ones.

    Raises:
        TypeError: something is no tensor.
    """
    # The order of a dictionary may differ between ranks.
    named = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    tensors = [one[1] if isinstance(one, tuple) else one for one in named]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"params must have tensors only, got {type(tensor).__name__}; broadcast other objects with hvd.broadcast_object"
            )
    _broadcast(tensors, root_rank, "horovod_sparse.parameters")


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: object = None) -> None:
    """Copy the state of an optimizer and its settings, such as learning rates, from rank `root_rank` to all others. Blocks.

    This replaces Horovod's function, which refuses bfloat16, tensors that are not contiguous, and LBFGS. As there, parameters
    of an optimizer without a state get gradients of zeros if they have none. But no step is made with them: weight decay
    would move the parameters. What a compressor keeps is each rank's own, and is left alone.

    Args:
        optimizer: PyTorch's, or Horovod's.
        root_rank: the rank that has the right state.
        model: has the embeddings whose gradients are sparse.

    Raises:
        ValueError: on every rank, if a setting on rank `root_rank` is of a type that `torch.load(weights_only=True)` does not
            read.
    """
    if not optimizer.state:
        modules = model.modules() if isinstance(model, torch.nn.Module) else ()
        sparse = {id(one.weight) for one in modules if isinstance(one, _EMBEDDINGS) and one.sparse}
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if parameter.requires_grad and parameter.grad is None:
                is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or id(parameter) in sparse
                zeros = torch.zeros_like(parameter)
                parameter.grad = zeros.to_sparse(1) if is_sparse else zeros
    is_root, name = mpi_ops.rank() == root_rank, "horovod_sparse.optimizer"
    tensors: list[Tensor] = []

    def put_aside(_: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return value
        tensors.append(value.cpu())
        return value.to("meta")

    def make_room(_: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        tensors.append(torch.empty(value.shape, dtype=value.dtype))
        return tensors[-1]

    frame = b""
    if is_root:
        try:
            frame = encode({"optimizer": mapped(optimizer.state_dict(), put_aside)})
        except Exception as error:
            # The other ranks wait for the frame.
            frame = encode({"problem": str(error)})
    # Only the root has any bytes.
    message = torch.tensor([*frame], dtype=torch.uint8)
    process_set = mpi_ops.global_process_set
    state = decode(mpi_ops.allgather(message, f"{name}.frame", process_set).numpy().tobytes())
    if "problem" in state:
        raise ValueError(f"optimizer must have settings that can be sent: {state['problem']}")
    made = None if is_root else mapped(state["optimizer"], make_room)
    _broadcast(tensors, root_rank, name)
    if made is not None:
        optimizer.load_state_dict(made)


def _broadcast(tensors: Iterable[Tensor], root: int, name: str) -> None:
    """Broadcast tensors in place. Each goes in one dimension."""
    under_way = []
    for number, tensor in enumerate(tensor.detach() for tensor in tensors):
        if tensor.numel() == 0:
            continue
        flat = tensor.reshape(-1)
        wire = flat.view(_WIRE[min(flat.itemsize, 8)])
        handle = mpi_ops.broadcast_async_(wire, root, f"{name}.{number}")
        under_way.append((tensor, flat, handle))
    for tensor, flat, handle in under_way:
        mpi_ops.synchronize(handle)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
