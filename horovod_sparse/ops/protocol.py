"""The array operations that a framework supplies. Imports no framework.

All arrays are flat (one-dimensional) and contiguous unless said otherwise. A *residual* is float32 or float64.
The NumPy implementation (`horovod_sparse.numpy.ops`) is the oracle: every other one selects the same entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Array = Any
"""An array of the framework: `numpy.ndarray`, `torch.Tensor`, ..."""
Part = tuple[int, Array]
"""The index of a part's first entry in a buffer, and an array for the part."""


@dataclass(slots=True)
class Sums:
    """Sums of the excesses |x_i| - threshold over all i with |x_i| > threshold, and their moments."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    largest: float = 0.0
    """The largest magnitude, if some exceed the threshold; else any number up to it."""
    logs: float = math.nan
    """The sum of ln(|x_i| - threshold); NaN unless it was asked for."""

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)

    @property
    def variance(self) -> float:
        """Population variance (divided by count); 0, infinite or NaN where float64 does not hold the squares."""
        return max(0.0, self.squares / max(self.count, 1) - self.mean * self.mean)

    @property
    def mean_log(self) -> float:
        return self.logs / max(self.count, 1)


NOTHING, EXTENT, SUMS = range(3)
"""What a selection asks of the whole array: nothing, its `Ops.extent`, or the sums of `Ops.measure`. Each includes the last."""


class Hints(NamedTuple):
    """What an algorithm expects of its next selection. Hints save time and never change what is selected."""

    cut: float = math.inf
    """The selection will most likely choose entries above this threshold, which is >= 0; infinity if nothing is expected."""
    room: int = 0
    """If more entries than this exceed the cut, they are of no use."""
    asks: int = NOTHING
    """What it will most likely ask of the whole array."""


class Moving(NamedTuple):
    """Momentum that is applied to gradients on their way into a buffer: `U = m U + G`, and the buffer gets U."""

    velocity: Array
    """U, an array like the buffer; it is changed."""
    momentum: float
    """m, >= 0."""


class Moved(NamedTuple):
    """How far an array has moved, `growth * (now - start) + pull * start`, which buffers take in as a gradient.

    It is computed in the wider of the array's type and the buffer's, and each operation is rounded.
    """

    now: Array
    """Where the array is, of any shape and float type."""
    start: Array
    """Where it began: an array of this shape and type."""
    growth: float
    pull: float

    @property
    def nbytes(self) -> int:
        return int(self.now.nbytes)


class Selection(NamedTuple):
    """What a compressor chose from a bucket."""

    indices: Array
    """int64, ascending, unique, at most the bucket's capacity."""
    found: int
    """How many entries qualified; more than `len(indices)` when the message has no room for all of them."""
    smallest: float = math.nan
    """The smallest magnitude that was selected, if `select_largest` made the selection."""


class Ops(Protocol):
    """The operations. Thresholds are compared strictly: an entry is above t when |x_i| > t, so zeros are never above."""

    def zeros(self, count: int, dtype: str, like: Array) -> Array:
        """A residual of `count` zeros of `dtype` ("float32" or "float64") on the device of `like`."""

    def tracked(self, x: Array) -> Tracked:
        """Return these operations for the array of a bucket, which remember what they have seen of it."""

    def accumulate(
        self, buffer: Array, gradients: Sequence[Part], moving: Moving | None = None, rate: float = 1.0
    ) -> list[int]:
        """Add gradients to their parts of a buffer, in place. They have any shape, float type and strides, and are not changed.

        A gradient may be `Moved`. What is added, after the momentum, is multiplied by `rate` before. The product is rounded,
        and then the sum is. Entries that are not finite in the buffer's type add nothing. Sums that leave the range of that
        type stay at its largest number. Return how many entries of each gradient are such exceptions. Raise ValueError if a
        gradient reaches beyond the buffer.
        """

    def measure(self, x: Array, threshold: float = 0.0, *, with_log: bool = False) -> Sums:
        """Return the sums of the excesses over `threshold` >= 0, accumulated in float64."""

    def extent(self, x: Array) -> Sums:
        """Return the count and the largest magnitude of `measure(x)`. The other sums may be left out."""
        return self.measure(x)

    def assign(self, residual: Array, gradient: Array) -> None:
        """Copy `gradient` into `residual`. `gradient` is as in `accumulate`, or an array of another framework on the host."""

    def copy_parts(self, x: Array, parts: Sequence[Part], divisor: float) -> None:
        """Write parts of x, which begin at these indices, to flat arrays, divided. They do not overlap, and have x's order."""

    def copy(self, array: Array) -> Array:
        """A copy that shares no memory with `array`, of the same shape."""

    def all_finite(self, array: Array) -> bool:
        """Return whether the array (any shape) holds neither NaN nor infinity."""

    def told(self, arrays: Sequence[Array]) -> list[list[Any]]:
        """Return the numbers in flat arrays. The host waits for a device once, whatever their number."""

    def norm(self, x: Array) -> float:
        """The Euclidean norm, accumulated in float64."""

    def select_above(self, x: Array, threshold: float, capacity: int) -> Selection:
        """Select the entries above `threshold` (all entries if it is negative), at most the `capacity` largest of them."""

    def select_largest(self, x: Array, count: int) -> Selection:
        """Select the `count` entries of largest magnitude; among equals, those of the lowest indices. 1 <= count <= len(x)."""

    def kth_largest(self, x: Array, count: int) -> float:
        """Return the smallest of the `count` largest magnitudes. 1 <= count <= len(x)."""

    def sampled_largest(self, x: Array, start: int, stride: int, count: int) -> float:
        """Return the smallest of the `count` largest magnitudes in `x[start::stride]`; 0 <= start < stride."""
        return self.kth_largest(x[start::stride], count)

    def indices(self, host: Any, like: Array) -> Array:
        """Return the indices `host`, a NumPy array of int64, as an array on the device of `like`."""

    def as_numpy(self, array: Array) -> Any:
        """Return the array as NumPy's, which must not be changed: the same memory on the host, a copy of a device's."""

    def union(self, gathered: Array, world: int, header: int, numel: int) -> Array | None:
        """Return all indices < `numel` (int64, ascending, unique) of `world` messages, in each after `header` numbers.

        None if one is not as `wire` requires.
        """

    def take_out(self, x: Array, indices: Array) -> Array:
        """Return x[indices] rounded to float32 and subtract it from x, so that sent + kept is x exactly."""

    def take_pairs_out(self, x: Array, indices: Array, capacity: int) -> Array:
        """Return the message of pairs (`pack`) of indices and of what `take_out` takes there."""
        return self.pack(indices, self.take_out(x, indices), capacity)

    def pack(self, indices: Array, values: Array, capacity: int) -> Array:
        """Return the message of pairs (see `horovod_sparse.exchange.wire`): int32, shape (capacity, 2)."""

    def quantize(self, x: Array, message: Array) -> Array:
        """Return a message of pairs, whose entries were taken out of `x`, as a packed one (`wire`, message 4).

        Values become one of two levels (message 4 of exchange/wire.py), also in `message`, in place. The rest returns to `x`.
        """

    def unquantize(self, gathered: Array, world: int, numel: int) -> Array:
        """Return the messages of pairs that `world` packed ones stand for, one after the other, for a bucket of `numel`.

        If the counts of a message are wrong, its first index is `wire.BAD_COUNTS`. Its other indices may have any flaw, which
        `rows_in_use` finds.
        """

    def rows_in_use(self, messages: Array, world: int, numel: int) -> Array:
        """Return, for each of `world` messages, how many indices come before its padding; -1 if it is not as `wire` requires.

        The messages stand one after the other: pairs, of shape (rows, 2), or indices alone. They are int32, for a bucket of
        `numel` entries. If the first index is -2 (`wire.NOT_FINITE`), so is the number. The numbers are for `told`.
        """

    def unpack(self, message: Array, used: int) -> tuple[Array, Array]:
        """Return the indices (int64) and values (float32) in the first `used` rows of one rank's message of pairs."""

    def pack_values(self, values: Array, length: int, tail: list[float]) -> Array:
        """Return `values`, zeros up to `length`, then the numbers of `tail`, as one array of the values' type."""

    def pack_indices(self, indices: Array, header: list[int], capacity: int) -> Array:
        """Return an int32 array: the numbers of `header`, then the indices, padded up to `capacity`."""

    def assemble(self, parts: Sequence[Part], messages: Array, used: list[int], divisor: float) -> None:
        """Set parts of a bucket to the sum of the messages' entries there.

        `messages` holds the messages of pairs of `len(used)` workers, one after the other. In each, the first `used` rows
        count. Values are divided by `divisor`, as float32, and added up from zero in the workers' order. On the host,
        IndexError is raised before a part is changed if indices do not ascend. A device is not waited for.
        """


class Tracked(Ops, Protocol):
    """The operations of a framework for one array. They may remember sums and large entries while it takes in gradients."""

    def begin(self, hints: Hints) -> None:
        """Begin a step. The array's parts are about to take in gradients, each part at most once."""

    def add(self, gradients: Sequence[Part], moving: Moving | None = None, rate: float = 1.0) -> list[int]:
        """Do as `Ops.accumulate`, for the array."""

    def forget(self) -> None:
        """Forget what was seen, because the array has changed, or because nothing more will be asked."""
