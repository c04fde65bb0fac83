"""Reads gradients from parameters, and puts reduced ones where the optimizer looks for them. Never imports Horovod."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from horovod_sparse.core.layout import Slot
from horovod_sparse.exchange.protocols import Reduced
from horovod_sparse.ops.protocol import Part

_WIDE = (torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return a parameter's gradient as a dense tensor; None if it has none, or is not trained at the moment."""
    gradient = parameter.grad
    if gradient is None or not parameter.requires_grad:
        return None
    return gradient.to_dense() if gradient.is_sparse else gradient


def write_reduced(
    slots: Sequence[Slot], reduced: Reduced, *, parameters: Mapping[str, Tensor], as_sparse: Collection[Tensor]
) -> list[str]:
    """Write the sum of all ranks' entries to the gradients of parameters, in their own memory where that is possible.

    `parameters` has them by name. Return the names of those whose gradients cannot hold it (`infinite`).
    """
    targets: list[tuple[Slot, Tensor]] = []
    later: list[tuple[Slot, Tensor, Tensor]] = []
    for slot in slots:
        parameter = parameters[slot.name]
        target = parameter.grad
        if not parameter.requires_grad:
            continue
        if target is None or target.is_sparse or (as_sparse and parameter in as_sparse):
            target = torch.empty(parameter.shape, dtype=wide(parameter), device=parameter.device)
            later.append((slot, parameter, target))
        targets.append((slot, target))
    beyond = write_to(targets, reduced)
    for slot, parameter, target in later:
        # The gradient is sparse on all ranks or dense on all, whatever a rank has: optimizers round the two differently.
        if parameter in as_sparse:
            parameter.grad = target.to(parameter.dtype).to_sparse()
        else:
            parameter.grad = torch.empty_like(parameter).copy_(target)
        beyond += infinite([(slot.name, parameter.grad)])
    return beyond


def infinite(gradients: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Return the names of gradients in half precision that hold infinity. A device is waited for once."""
    half = [(name, tensor) for name, tensor in gradients if tensor is not None and tensor.dtype in _HALF]
    if not half:
        return []
    found = torch.stack([(t._values() if t.is_sparse else t).isinf().any() for _, t in half]).tolist()
    return [name for (name, _), is_infinite in zip(half, found, strict=True) if is_infinite]


def write_to(targets: Sequence[tuple[Slot, Tensor]], reduced: Reduced) -> list[str]:
    """Write the sum of all ranks' entries to dense tensors, one for each slot. Return those that cannot hold it."""
    parts: list[Part] = []
    rounded: list[tuple[Tensor, Tensor]] = []
    for slot, target in targets:
        if target.dtype in _WIDE and target.is_contiguous():
            parts.append((slot.offset, target if target.dim() == 1 else target.view(-1)))
            continue
        # Half-precision sums are rounded once at the end, not after every rank.
        flat = torch.empty(target.numel(), dtype=wide(target), device=target.device)
        parts.append((slot.offset, flat))
        rounded.append((target, flat))
    reduced.write(parts)
    for target, flat in rounded:
        target.copy_(flat.view(target.shape))
    return infinite((slot.name, target) for slot, target in targets)


def wide(tensor: Tensor) -> torch.dtype:
    """Return the type in which gradients of a tensor's type are summed."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
