"""Writes reduced gradients in their types. Never imports Horovod."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horovod_sparse.core.layout import Slot
from horovod_sparse.exchange.protocols import Reduced
from horovod_sparse.ops.protocol import Part

_WIDE = (torch.float32, torch.float64)


def write_to(targets: Sequence[tuple[Slot, Tensor]], reduced: Reduced) -> list[str]:
    """Write the sum of all ranks' entries to dense tensors, one for each slot. Return those in half precision that overflow."""
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
    half = [(slot.name, target) for slot, target in targets if target.dtype not in _WIDE]
    if not half:
        return []
    # A device is waited for once.
    found = torch.stack([target.isinf().any() for _, target in half]).tolist()
    return [name for (name, _), is_infinite in zip(half, found, strict=True) if is_infinite]


def wide(tensor: Tensor) -> torch.dtype:
    """Return the type in which gradients of a tensor's type are summed."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
