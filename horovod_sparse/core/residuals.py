"""The shared residual buffer manager: one flat buffer per bucket, in which each parameter is a named slice.

It owns the buffers. Nothing here is broadcast: every rank keeps its own residuals and must save its own state.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from horovod_sparse.core.layout import Layout, Slot
from horovod_sparse.exchange.wire import LARGEST
from horovod_sparse.ops.protocol import Array, Ops

_LARGEST = {"float32": LARGEST, "float64": sys.float_info.max}


class Residuals:
    """Flat residual buffers with named slices."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._buffers: dict[str, Array] = {}
        self._slots: dict[str, tuple[str, Slot]] = {}

    def allocate(self, layout: Layout, like: Array) -> Array:
        """Make and return the zeroed buffer of a bucket, on the device of `like`."""
        buffer = self._ops.zeros(layout.numel, layout.residual_dtype, like)
        self._buffers[layout.name] = buffer
        for slot in layout.slots:
            if slot.name in self._slots:
                raise ValueError(f"parameter {slot.name!r} already has a residual; names must be unique")
            self._slots[slot.name] = (layout.name, slot)
        return buffer

    def view(self, name: str) -> Array:
        """Return the flat slice of one parameter; writing to it changes the residual."""
        bucket, slot = self._slots[name]
        return self._buffers[bucket][slot.offset : slot.offset + slot.numel]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that have a residual, by name."""
        return {name: slot.shape for name, (_, slot) in self._slots.items()}

    @property
    def nbytes(self) -> int:
        return sum(int(buffer.nbytes) for buffer in self._buffers.values())

    def reset(self) -> None:
        for buffer in self._buffers.values():
            buffer[:] = 0

    def rescale(self, factor: float) -> None:
        for buffer in self._buffers.values():
            multiply(buffer, factor)

    def state_dict(self) -> dict[str, Array]:
        """Return copies of the residuals by parameter name, in the parameters' shapes."""
        return {name: self._ops.copy(self.view(name)).reshape(slot.shape) for name, (_, slot) in self._slots.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the residuals from `state`, which holds exactly the parameters of `shapes`."""
        for name in self._slots:
            self._ops.assign(self.view(name), state[name])


def multiply(array: Array, factor: float) -> None:
    """Multiply a residual by `factor` > 0, in place. What leaves the range of its type stays at the type's largest number."""
    with np.errstate(over="ignore"):
        array *= factor
    if factor > 1.0:
        array[...] = within_range(array)


def within_range(array: Array) -> Array:
    """Return a residual whose infinities are the largest number of their type."""
    largest = _LARGEST.get(str(array.dtype).removeprefix("torch."))
    return array if largest is None else array.clip(-largest, largest)
