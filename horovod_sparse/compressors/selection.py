"""What is checked of what a compressor's `select` returns. Imports no framework."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.ops.protocol import Array, Ops, Selection


def check_selection(name: str, selection: Selection, x: Array, capacity: int) -> Selection:
    """Return what `select` of the class `name` has returned. Raise TypeError or ValueError if that is no selection from `x`."""
    kind, what = _flaw(selection, x, capacity)
    if what:
        raise kind(
            f"{name}.select must return Selection(indices, found) with at most {capacity} indices (int64, ascending, each "
            f"once, in [0, {len(x)})) and the number of entries that qualified (an int, no less), got {what}; use "
            "Selection(ops.indices(chosen, x), len(chosen)), or what ops.select_largest returns"
        )
    return selection


class Checked:
    """Does as `Compressor.select` of a class that is not this package's, and checks it.

    Each selection is checked. The first time so is x, which nothing may write to; a device is waited for.
    """

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._is_first = True

    def __call__(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        name, before = type(self._compressor).__name__, ops.copy(x) if self._is_first else x
        selection = self._compressor.select(ops, x, k, capacity, state)
        check_selection(name, selection, x, capacity)
        changed = int((before != x).sum()) if self._is_first else 0
        if changed:
            raise ValueError(
                f"{name}.select must not write to x, the gradient with what waits, but has changed {changed} of {len(x)} "
                "entries; compute with a copy: ops.copy(x), or x.abs() and the like, which make arrays of their own"
            )
        self._is_first = False
        return selection


def _flaw(selection: object, x: Array, capacity: int) -> tuple[type[Exception], str]:
    """Return what is wrong with a selection from `x`, and the class of its error; "" if nothing is."""
    if not isinstance(selection, Selection):
        return TypeError, f"an object of type {type(selection).__name__}"
    indices: Any = selection.indices
    found: object = selection.found
    if not (isinstance(indices, type(x)) or isinstance(x, type(indices))):
        return TypeError, f"indices of type {type(indices).__name__} for entries of type {type(x).__name__}"
    if indices.dtype != np.int64 and str(indices.dtype) != "torch.int64":
        return TypeError, f"indices of type {indices.dtype}"
    if not isinstance(found, Integral):
        return TypeError, f"found={found!r}"
    place, device = (str(getattr(array, "device", "cpu")) for array in (indices, x))
    if indices.ndim != 1 or len(indices) > capacity:
        return ValueError, f"indices of shape {tuple(indices.shape)}"
    if place != device:
        return ValueError, f"indices on {place} for entries on {device}"
    # A device is not waited for.
    if device == "cpu" and len(indices):
        on_host = np.asarray(indices)
        if not (on_host[1:] > on_host[:-1]).all():
            return ValueError, "indices that do not ascend, or occur twice"
        if on_host[0] < 0 or on_host[-1] >= len(x):
            return ValueError, f"indices from {on_host[0]} to {on_host[-1]}"
    return ValueError, f"found={found} with {len(indices)} indices" if int(found) < len(indices) else ""
