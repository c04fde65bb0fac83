"""Checks whether gradients are still what backward has handed over. Imports torch and NumPy; never Horovod.

Not every change raises a tensor's version (`GradScaler.unscale_`, `gradient.data`, `gradient.numpy()`), so a few entries are
compared too. Entries that are zero would not show that a gradient was scaled. On a device, where the host must not wait to
find others, such a change stays unseen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from horovod_sparse.torch.ops import on_host

_SAMPLES = 16
"""About how many entries of each gradient are compared."""
_BLOCK = 2**16
"""If those entries are all zero on the CPU, this many entries at a time are searched for one that is not."""


class Handed(NamedTuple):
    """A gradient as backward has handed it over."""

    gradient: Tensor | None
    version: int
    """The tensor's version. It also counts changes of other tensors that live in the same memory."""
    sample: bytes | Tensor
    """Some entries: bytes on the CPU, a tensor on other devices, since the host must not wait."""
    places: slice
    """Where those entries are in the flat gradient."""


def hand_over(gradient: Tensor | None) -> Handed:
    """Record what a gradient is now."""
    if gradient is None:
        return Handed(None, 0, b"", slice(0))
    dense = _dense(gradient)
    places = slice(None, None, max(1, dense.numel() // _SAMPLES))
    sample = _sample(dense, places)
    # Zeros of either sign consist of these bytes alone. If any other bytes are left, some entry is not zero.
    if isinstance(sample, bytes) and not sample.strip(b"\x00\x80"):
        places = _not_zero(_numbers(dense))
        sample = _sample(dense, places)
    return Handed(gradient, gradient._version, sample, places)


def first_changed(handed: Mapping[Tensor, Handed], *, wait: bool = True) -> Tensor | None:
    """Return a parameter whose gradient is not what was handed over, or None.

    Waits once if some are on a device. If it must not `wait`, only the version shows a change there.
    """
    later: dict[Tensor, Tensor] = {}
    for parameter, (gradient, version, sample, places) in handed.items():
        if parameter.grad is not gradient:
            return parameter
        if gradient is None:
            continue
        if gradient._version != version and (gradient.is_sparse or _owns_its_memory(gradient)):
            return parameter
        if isinstance(sample, Tensor) and not wait:
            continue
        now = _sample(_dense(gradient), places) if len(sample) else sample
        if isinstance(sample, Tensor) and isinstance(now, Tensor):
            # Bytes, because NaN is not equal to itself.
            later[parameter] = (now.view(torch.uint8) != sample.view(torch.uint8)).any()
        elif now != sample:
            return parameter
    device = next((differ.device for differ in later.values()), None)
    found = torch.stack([differ.to(device) for differ in later.values()]).tolist() if later else []
    return next((parameter for parameter, differ in zip(later, found, strict=True) if differ), None)


def _dense(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _sample(dense: Tensor, places: slice) -> bytes | Tensor:
    if on_host(dense):
        return _numbers(dense)[places].tobytes()
    # In the order of the memory if that needs no copy.
    flat = dense.as_strided((dense.numel(),), (1,)) if _owns_its_memory(dense) else dense.reshape(-1)
    return flat[places].clone()


def _owns_its_memory(dense: Tensor) -> bool:
    return dense.untyped_storage().nbytes() == dense.numel() * dense.itemsize


def _numbers(dense: Tensor) -> np.ndarray:
    """Return the entries of a tensor on the CPU, flat and in the order of the memory."""
    # NumPy has no bfloat16.
    return (dense.view(torch.int16) if dense.dtype == torch.bfloat16 else dense).numpy().ravel("K")


def _not_zero(entries: np.ndarray) -> slice:
    """Return the places of some entries, beginning with the first one that is not zero."""
    for start in range(0, len(entries), _BLOCK):
        first = start + int((entries[start : start + _BLOCK] != 0).argmax())
        if entries[first]:
            return slice(first, first + _SAMPLES)
    return slice(0)
