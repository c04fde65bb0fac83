"""What ranks compare of their parameters before they exchange anything. Never imports Horovod."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def described(named: Mapping[Tensor, str]) -> list[str]:
    """Return name, shape and type of each parameter."""
    return [f"{name} {tuple(parameter.shape)} {parameter.dtype}" for parameter, name in named.items()]


def sums(named: Mapping[Tensor, str]) -> list[int]:
    """Return a number for each parameter that tells its values from others: the sum of its bits, read as whole numbers."""
    parts = []
    for parameter in named:
        flat = parameter.detach().reshape(-1)
        if flat.storage_offset() * flat.itemsize % 8:
            flat = flat.clone()
        parts.append(flat.view(torch.uint8 if flat.nbytes % 8 else torch.int64).sum(dtype=torch.int64))
    return [int(part) for part in parts]


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
        if parameter.numel() and not _address(parameter):
            raise TypeError(
                f"parameter {name!r} must have its values in memory of its own, got a {type(parameter).__name__} on "
                f"{parameter.device} without any; use plain tensors, with DistributedDataParallel or Horovod's optimizer, and "
                "no FSDP2 or other wrapper; give tensors on 'meta' their values first"
            )


def _address(tensor: Tensor) -> int:
    """Return where the values of a tensor begin; 0 if nowhere."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0
