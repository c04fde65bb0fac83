"""Array verbs that use what is already known of one array, where that suffices. Imports no framework."""

from __future__ import annotations

from typing import Any

from horovod_sparse.ops.protocol import Above, Array, Moments, Ops, Selection, Sums


class Known:
    """Implements `Ops` by another one. It need not read all of `x` where only the entries above a cut matter.

    Args:
        ops: the framework's verbs.
        x: the array. `sums` and `above` must describe its current values.
        sums: the sums of x; None if they are not known.
        above: the entries of x above a cut; None if they are not known.
    """

    def __init__(self, ops: Ops, x: Array, sums: Sums | None, above: Above | None) -> None:
        self._ops = ops
        self._x = x
        self._sums = sums
        self._above = above

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def measure(self, x: Array) -> Sums:
        return self._sums if x is self._x and self._sums is not None else self._ops.measure(x)

    def moments(self, x: Array, threshold: float, *, with_log: bool = False) -> Moments:
        return self._ops.moments(self._exceeding(x, threshold), threshold, with_log=with_log)

    def counts(self, x: Array, thresholds: list[float]) -> list[int]:
        return self._ops.counts(self._exceeding(x, min(thresholds)), thresholds)

    def select_above(self, x: Array, threshold: float, capacity: int) -> Selection:
        among = self._exceeding(x, threshold)
        return self._of(x, among, self._ops.select_above(among, threshold, capacity))

    def select_largest(self, x: Array, count: int) -> Selection:
        among = self._at_least(x, count)
        return self._of(x, among, self._ops.select_largest(among, count))

    def kth_largest(self, x: Array, count: int) -> float:
        return self._ops.kth_largest(self._at_least(x, count), count)

    def _exceeding(self, x: Array, threshold: float) -> Array:
        """Return an array that contains all entries of x above the threshold."""
        return self._above.values if x is self._x and self._above and threshold >= self._above.cut else x

    def _at_least(self, x: Array, count: int) -> Array:
        """Return an array that contains the `count` largest entries of x."""
        return self._above.values if x is self._x and self._above and len(self._above.values) >= count else x

    def _of(self, x: Array, among: Array, selection: Selection) -> Selection:
        """Return a selection among some entries of x with its indices in x."""
        if among is x:
            return selection
        assert self._above is not None
        return Selection(self._ops.pick(self._above.indices, selection.indices), selection.found)
