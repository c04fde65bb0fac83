"""Checks that a timed selection is right, by the NumPy oracle or by definition. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.compressors.base import BucketState
from horovod_sparse.compressors.micro import part
from horovod_sparse.numpy.ops import NumpyOps

_ORACLE = NumpyOps()


class Sent(NamedTuple):
    """The result of a step."""

    x: NDArray[Any]
    """The entries that the step selected from."""
    indices: NDArray[Any]
    """The indices of the entries that were sent."""
    k: int
    capacity: int
    state: BucketState


Check = Callable[[Sent], None]


def exact(sent: Sent) -> None:
    """Check that the k largest were sent, and among equals those with the lowest indices."""
    _same(sent, _ORACLE.select_largest(sent.x, sent.k).indices)


def above(fewest: float, most: float) -> Check:
    """Return a check that all above the threshold was sent, as room allowed, and its count is within these multiples of k."""

    def check(sent: Sent) -> None:
        selection = _ORACLE.select_above(sent.x, sent.state.threshold, sent.capacity)
        _same(sent, selection.indices)
        _within(selection.found, sent.k, fewest, most)

    return check


def sampled(sent: Sent) -> None:
    """Check as `above` does, but if too many exceed the threshold, the k largest must have been sent (DGC)."""
    selection = _ORACLE.select_above(sent.x, sent.state.threshold, len(sent.x))
    few = selection.found <= 1.3 * sent.k
    _same(sent, selection.indices if few else _ORACLE.select_largest(sent.x, sent.k).indices)
    _within(len(sent.indices), sent.k, 0.8, 1.3)


def own_part(sent: Sent) -> None:
    """Check that this worker sent all of its part above the threshold, and that all workers together sent about k (MiCRO)."""
    place = sent.state.place
    # The state is already that of the next step.
    start, end = part(len(sent.x), place.world, (sent.state.step - 1 + place.position) % place.world)
    mine = sent.indices[(sent.indices >= start) & (sent.indices < end)] - start
    expected = _ORACLE.select_above(sent.x[start:end], sent.state.threshold, sent.capacity).indices
    if expected.size == 0:
        expected = _ORACLE.select_largest(sent.x[start:end], 1).indices
    _same(sent._replace(indices=mine), expected)
    _within(len(sent.indices), max(sent.k, place.world), 0.5, 2.0)


def draw(sent: Sent) -> None:
    """Check that any k entries were sent, in order."""
    assert len(sent.indices) == sent.k and (np.diff(sent.indices) > 0).all(), "not k different entries"
    assert sent.indices[0] >= 0 and sent.indices[-1] < len(sent.x), "out of range"


def block(sent: Sent) -> None:
    """Check that k neighbours were sent, possibly around the end."""
    draw(sent)
    gaps = np.diff(sent.indices, append=sent.indices[0] + len(sent.x))
    assert np.count_nonzero(gaps > 1) <= 1, "not neighbours"


def everything(sent: Sent) -> None:
    """Check that all entries were sent."""
    _same(sent, np.arange(len(sent.x)))


def _same(sent: Sent, expected: NDArray[Any]) -> None:
    assert np.array_equal(sent.indices, expected), f"{len(sent.indices)} entries were sent, {len(expected)} were due"


def _within(count: int, k: int, fewest: float, most: float) -> None:
    low, high = math.floor(fewest * k), math.ceil(most * k)
    assert low <= count <= high, f"{count} entries qualified, from {low} to {high} were due"
