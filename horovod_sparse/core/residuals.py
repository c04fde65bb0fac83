"""The residuals of one rank: a flat buffer per bucket, in which each parameter is a named slice.

Tested by tests/core/test_state.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from horovod_sparse.core.layout import Layout
from horovod_sparse.exchange.wire import LARGEST
from horovod_sparse.ops.protocol import Array, Ops

_LARGEST = {"float32": LARGEST, "float64": sys.float_info.max}


class Residuals:
    """Flat residual buffers with named slices."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.views: dict[str, Array] = {}
        """The slice of each parameter, in its shape, by name; writing to it changes the residual."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """The shapes of the parameters that have a residual, by name."""
        self.aside: dict[str, Array | None] = {}
        """What waits of parameters without a gradient in the last step; None if nothing does. In the buffer they have zeros."""

    def allocate(self, layout: Layout, like: Array) -> Array:
        """Make and return the zeroed buffer of a bucket, on the device of `like`."""
        buffer = self._ops.zeros(layout.numel, layout.residual_dtype, like)
        for slot in layout.slots:
            if slot.name in self.views:
                raise ValueError(f"parameter {slot.name!r} already has a residual; names must be unique")
            self.views[slot.name] = buffer[slot.offset : slot.offset + slot.numel].reshape(slot.shape)
            self.shapes[slot.name] = slot.shape
        return buffer

    def set_aside(self, name: str) -> None:
        """Let what waits of a parameter wait until it has a gradient again, so that nothing of it is selected."""
        if name in self.aside:
            return
        # A device is waited for when a parameter begins to have no gradient, and not again.
        waits, self.aside[name] = bool(self.views[name].any()), None
        if waits:
            self.aside[name] = self._ops.copy(self.views[name])
            self.views[name][...] = 0

    def put_back(self, name: str) -> None:
        """Let a parameter go on with what was set aside."""
        waiting = self.aside.pop(name, None)
        if waiting is not None:
            self._ops.assign(self.views[name], waiting)

    def reset(self) -> None:
        self.aside.clear()
        for view in self.views.values():
            view[...] = 0

    def rescale(self, factor: float) -> None:
        for array in (*self.views.values(), *self.aside.values()):
            if array is not None:
                multiply(array, factor)

    def state_dict(self) -> dict[str, Array]:
        """Return copies of the residuals by parameter name, in the parameters' shapes."""
        waiting = {name: array for name, array in self.aside.items() if array is not None}
        return {name: self._ops.copy(one) for name, one in {**self.views, **waiting}.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the residuals from `state`, which holds exactly the parameters of `shapes`."""
        self.aside.clear()
        for name, view in self.views.items():
            self._ops.assign(view, state[name])


def multiply(array: Array, factor: float) -> None:
    """Multiply a residual by `factor` > 0, in place. What leaves the range of its type stays at the type's largest number."""
    with np.errstate(over="ignore"):
        array *= factor
    largest = _LARGEST.get(str(array.dtype).removeprefix("torch."))
    if factor > 1.0 and largest is not None:
        array[...] = array.clip(-largest, largest)
