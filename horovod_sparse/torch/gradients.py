"""Reads gradients from parameters, and puts reduced ones where the optimizer looks for them. Never imports Horovod."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from horovod_sparse.core.layout import Slot
from horovod_sparse.exchange.protocols import Reduced
from horovod_sparse.ops.protocol import Part

_WIDE = (torch.float32, torch.float64)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return a parameter's gradient as a dense tensor; None if it has none, or is not trained at the moment."""
    gradient = parameter.grad
    if gradient is None or not parameter.requires_grad:
        return None
    return gradient.to_dense() if gradient.is_sparse else gradient


def write_reduced(
    slots: Sequence[Slot], parameters: Sequence[Tensor], reduced: Reduced, as_sparse: Collection[Tensor]
) -> None:
    """Write the sum of all ranks' entries to the gradients of parameters, in their own memory where that is possible."""
    parts: list[Part] = []
    rounded: list[tuple[Tensor, Tensor]] = []
    for slot, parameter in zip(slots, parameters, strict=True):
        gradient = parameter.grad
        if not parameter.requires_grad:
            continue
        if (
            gradient is not None
            and gradient.dtype in _WIDE
            and not gradient.is_sparse
            and gradient.is_contiguous()
            and parameter not in as_sparse
        ):
            parts.append((slot.offset, gradient if gradient.dim() == 1 else gradient.view(-1)))
            continue
        # Half-precision sums are rounded once at the end, not after every rank.
        wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        flat = torch.empty(parameter.numel(), dtype=wide, device=parameter.device)
        parts.append((slot.offset, flat))
        rounded.append((parameter, flat))
    reduced.write(parts)
    for parameter, flat in rounded:
        write_dense(parameter, flat.view(parameter.shape), as_sparse=parameter in as_sparse)


def write_dense_parts(parameters: Sequence[Tensor], reduced: Sequence[Tensor], as_sparse: Collection[Tensor]) -> None:
    """Write `reduced` to the gradients of the parameters that are trained, most of them in one call."""
    targets, sources = [], []
    for parameter, flat in zip(parameters, reduced, strict=True):
        gradient = parameter.grad
        if not parameter.requires_grad:
            continue
        part = flat if parameter.dim() == 1 else flat.view(parameter.shape)
        if gradient is None or gradient.is_sparse or parameter in as_sparse:
            write_dense(parameter, part, as_sparse=parameter in as_sparse)
        elif gradient.data_ptr() != part.data_ptr():
            targets.append(gradient)
            sources.append(part)
    if targets:
        torch._foreach_copy_(targets, sources)


def write_dense(parameter: Tensor, reduced: Tensor, *, as_sparse: bool) -> None:
    """Write `reduced` to the gradient, sparse if `as_sparse`. A dense gradient that stays dense keeps its layout."""
    gradient = parameter.grad
    # The gradient is sparse on all ranks or dense on all, whatever a rank has: optimizers round the two differently.
    if as_sparse:
        parameter.grad = reduced.to(parameter.dtype).to_sparse()
    elif gradient is None or gradient.is_sparse:
        parameter.grad = torch.empty_like(parameter).copy_(reduced)
    elif gradient.data_ptr() != reduced.data_ptr():
        gradient.copy_(reduced)
