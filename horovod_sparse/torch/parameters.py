"""What ranks hold of parameters, and what they compare before they exchange anything. Never imports Horovod."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core import agreement

_PART = 2**20
"""So many words of a parameter are added up at a time, so that little memory is needed."""


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank holds only a part of a tensor, as of the parameters of `fully_shard`: it is a DTensor."""
    # To import the class takes seconds.
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor that this rank holds, in its own memory. Any other tensor is returned as it is."""
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def held(parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Return the parts of parameters that this rank holds, as plain tensors. One that is not sharded is its own part."""
    return {one: local_part(one).detach() if is_sharded(one) else one for one in parameters}


def follow(parts: Mapping[Tensor, Tensor]) -> None:
    """Let the parts that `held` has returned be those that the parameters have now, and be trained if these are."""
    for parameter, part in parts.items():
        if part is not parameter:
            part.requires_grad_(parameter.requires_grad)
            now = local_part(parameter)
            if now.data_ptr() != part.data_ptr():
                part.data = now


def description(
    compressor: Compressor, named: Mapping[Tensor, str], groups: Sequence[Mapping[str, Any]] = ()
) -> agreement.Description:
    """Return what must be equal on all ranks, whatever connects them: settings, parameters, and what `groups` say of both."""
    parameters = [f"{name} {tuple(parameter.shape)} {parameter.dtype}" for parameter, name in named.items()]
    # Residuals may be in units of the update, which depends on the learning rates.
    rates = {"lr": [str(float(group["lr"])) for group in groups]} if compressor.lr_in_residual else {}
    return agreement.description(compressor, parameters, **rates)


def sums(parameters: Iterable[Tensor]) -> list[int]:
    """Return a number for each parameter that tells its values from others: its words, times their places, added up."""
    totals: list[int | Tensor] = []
    for parameter in parameters:
        flat = parameter.detach().reshape(-1)
        if flat.storage_offset() * flat.itemsize % 4:
            flat = flat.clone()
        bits = flat.view(torch.uint8 if flat.nbytes % 4 else torch.int32)
        total: int | Tensor = 0
        for start in range(0, len(bits), _PART):
            part = bits[start : start + _PART]
            weights = torch.arange(2 * start + 1, 2 * (start + len(part)), 2, device=bits.device)
            total = total + (part * weights).sum()
        totals.append(total)
    return [int(total) for total in totals]


def wide(tensor: Tensor) -> torch.dtype:
    """Return the type in which gradients of a tensor's type are summed."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def check_real(named: Mapping[Tensor, str]) -> None:
    """Raise TypeError if a parameter is complex."""
    for parameter, name in named.items():
        if parameter.is_complex():
            raise TypeError(
                f"parameter {name!r} must be real, got {parameter.dtype}, which cannot be reduced; make the real view the "
                "parameter (torch.view_as_real), and use torch.view_as_complex of it in the model"
            )


def check_memory(named: Mapping[Tensor, str]) -> None:
    """Raise TypeError if a parameter has no memory of its own: a DTensor, another wrapper of tensors, or one on "meta"."""
    for parameter, name in named.items():
        try:
            address = parameter.data_ptr()
        except RuntimeError:
            address = 0
        if parameter.numel() and not address:
            raise TypeError(
                f"parameter {name!r} must have its values in memory of its own, got a {type(parameter).__name__} on "
                f"{parameter.device} without any; use plain tensors with DistributedDataParallel or Horovod's optimizer, or "
                "register a model of fully_shard; give tensors on 'meta' their values first"
            )
