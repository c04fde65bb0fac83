"""Whether gradients still are what backward has handed over. Imports torch and NumPy; never Horovod.

Not every change raises a tensor's version (`GradScaler.unscale_`, `gradient.data`, `gradient.numpy()`), so a few entries are
compared too. Entries that are zero would not show a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_SAMPLES = 16
"""Entries of every gradient that are compared."""
_BLOCK = 2**16
"""Where those are zero on the CPU, others are looked for in so many at a time."""


class Handed(NamedTuple):
    """A gradient as backward has handed it over."""

    gradient: Tensor | None
    version: int | None
    """None if other tensors live in the same memory, whose changes would count too."""
    sample: bytes | Tensor
    """Some entries; on other devices than the CPU a tensor, since the host must not wait."""
    places: slice
    """Where those are."""


def hand_over(gradient: Tensor | None) -> Handed:
    """Remember what a gradient is now."""
    if gradient is None:
        return Handed(None, None, b"", slice(0))
    flat = _flat(gradient)
    version = gradient._version if gradient.is_sparse or _owns_its_memory(flat) else None
    spread = slice(None, None, max(1, flat.numel() // _SAMPLES))
    if not _on_host(flat):
        return Handed(gradient, version, flat[spread].clone(), spread)
    entries = _numbers(flat)
    sample = entries[spread].tobytes()
    # What is left is not zero: zeros of either sign consist of these bytes.
    if sample.strip(b"\x00\x80"):
        return Handed(gradient, version, sample, spread)
    places = _not_zero(entries)
    return Handed(gradient, version, entries[places].tobytes(), places)


def without_sample(handed: Handed) -> Handed:
    """Of a gradient that is being reduced in its own memory: only its version tells of other changes."""
    return handed._replace(sample=b"", places=slice(0))


def first_changed(handed: Mapping[Tensor, Handed]) -> Tensor | None:
    """A parameter whose gradient is not what was handed over; of other devices than the CPU it waits for each once."""
    later: dict[torch.device, list[Tensor]] = {}
    for parameter, (gradient, version, sample, places) in handed.items():
        if parameter.grad is not gradient:
            return parameter
        if gradient is None:
            continue
        if version is not None and gradient._version != version:
            return parameter
        if isinstance(sample, Tensor):
            later.setdefault(sample.device, []).append(parameter)
        elif _numbers(_flat(gradient))[places].tobytes() != sample:
            return parameter
    for parameters in later.values():
        differences = [_difference(handed[parameter]) for parameter in parameters]
        if bool(torch.stack(differences).any()):
            return next(p for p, difference in zip(parameters, differences, strict=True) if bool(difference))
    return None


def _difference(handed: Handed) -> Tensor:
    """Whether the entries differ, on their device. Bytes are compared: NaN is not equal to itself."""
    gradient, _, sample, places = handed
    assert gradient is not None and isinstance(sample, Tensor)
    now = _flat(gradient)[places].contiguous()
    return (now.view(torch.uint8) != sample.view(torch.uint8)).any()


def _flat(gradient: Tensor) -> Tensor:
    """Its entries, of a sparse tensor the values, as they lie in memory if that needs no copy."""
    dense = gradient._values() if gradient.is_sparse else gradient
    if dense.dim() == 1 and dense.is_contiguous():
        return dense
    if not dense.is_contiguous() and _owns_its_memory(dense):
        return dense.as_strided((dense.numel(),), (1,), 0)
    return dense.reshape(-1)


def _on_host(flat: Tensor) -> bool:
    return flat.is_cpu


def _owns_its_memory(dense: Tensor) -> bool:
    return dense.untyped_storage().nbytes() == dense.numel() * dense.itemsize


def _numbers(flat: Tensor) -> np.ndarray:
    # NumPy has no bfloat16.
    return (flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat).numpy()


def _not_zero(entries: np.ndarray) -> slice:
    """Some entries that begin with the first that is not zero."""
    for start in range(0, len(entries), _BLOCK):
        found = entries[start : start + _BLOCK] != 0
        first = int(found.argmax())
        if found[first]:
            return slice(start + first, start + first + _SAMPLES)
    return slice(0)
