"""Operations that know the large entries of one array, and look only at those where they suffice. Imports no framework.

Tested by tests/kernels/test_tracked.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from horovod_sparse.ops.protocol import Array, Hints, Moving, Ops, Part, Selection, Sums


class Above(NamedTuple):
    """All entries of an array above a cut, in ascending order of their indices."""

    cut: float
    indices: Array
    values: Array


class Cached:
    """Implements `Tracked` for the array `x` on the operations of a framework alone. It knows what it was told of x."""

    def __init__(self, ops: Ops, x: Array, above: Above | None = None) -> None:
        self._ops = ops
        self._x = x
        self.above = above
        """What is known of the array."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def begin(self, hints: Hints) -> None:
        self.forget()

    def add(self, gradients: Sequence[Part], moving: Moving | None = None, rate: float = 1.0) -> list[int]:
        return self._ops.accumulate(self._x, gradients, moving, rate)

    def forget(self) -> None:
        self.above = None

    def measure(self, x: Array, threshold: float = 0.0, *, with_log: bool = False) -> Sums:
        return self._ops.measure(self._exceeding(x, threshold), threshold, with_log=with_log)

    def select_above(self, x: Array, threshold: float, capacity: int) -> Selection:
        among = self._exceeding(x, threshold)
        return self._of(x, among, self._ops.select_above(among, threshold, capacity))

    def select_largest(self, x: Array, count: int) -> Selection:
        above = self.above if x is self._x else None
        among = above.values if above and len(above.values) >= count else x
        return self._of(x, among, self._ops.select_largest(among, count))

    def _exceeding(self, x: Array, threshold: float) -> Array:
        """Return an array that contains all entries of x above the threshold."""
        above = self.above if x is self._x else None
        return above.values if above and threshold >= above.cut else x

    def _of(self, x: Array, among: Array, selection: Selection) -> Selection:
        """Return a selection among some entries of x with its indices in x."""
        if among is x:
            return selection
        assert self.above is not None
        return selection._replace(indices=self.above.indices[selection.indices])


def narrow(ops: Ops, x: Array, threshold: float) -> Ops:
    """Return operations that know the entries of `x` above `threshold` >= 0. They hold as long as `x` does not change."""
    indices = ops.select_above(x, threshold, len(x)).indices
    return cast(Ops, Cached(ops, x, Above(threshold, indices, x[indices])))
