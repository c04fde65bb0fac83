"""The array verbs that a framework supplies; everything else is written once on top of them. Imports no framework.

All arrays are flat (one-dimensional) and contiguous unless said otherwise. A *residual* is float32 or float64.
The NumPy implementation (`horovod_sparse.numpy.ops`) is the oracle: every other one selects the same entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Array = Any
"""An array of the framework: `numpy.ndarray`, `torch.Tensor`, ..."""
Part = tuple[int, Array]
"""The index of a part's first entry in a buffer, and an array for the part."""


@dataclass(frozen=True)
class Moments:
    """Statistics of the excesses |x_i| - threshold over all i with |x_i| > threshold."""

    count: int
    mean: float
    variance: float
    """Population variance (divided by count); 0, infinite or NaN where float64 does not hold the squares."""
    mean_log: float
    """Mean of ln(|x_i| - threshold); NaN unless it was asked for."""


@dataclass(frozen=True)
class Sums:
    """What the moments of an array's magnitudes are made of; those of two parts add up to those of the whole."""

    count: int = 0
    """Entries that are not zero."""
    total: float = 0.0
    squares: float = 0.0
    largest: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            max(self.largest, other.largest),
        )

    def moments(self, logs: float = math.nan) -> Moments:
        """Of the magnitudes that are not zero; `logs` is the sum of their logarithms."""
        if self.count == 0:
            return Moments(0, 0.0, 0.0, math.nan)
        mean = self.total / self.count
        return Moments(self.count, mean, max(0.0, self.squares / self.count - mean * mean), logs / self.count)


class Wanted(NamedTuple):
    """What is to be noted of a buffer while it takes in gradients, if that costs no pass of its own."""

    cut: float = math.inf
    """> 0: the entries above it; infinity for none."""
    room: int = 0
    """Of more entries than these none are wanted."""
    sums: bool = False


class Above(NamedTuple):
    """All entries above a cut."""

    cut: float
    indices: Array
    """Ascending; int32 or int64."""
    values: Array
    """Copies, of the array's type."""


class Notes(Protocol):
    """What is found out about a buffer while its parts take in gradients."""

    @property
    def sums(self) -> Sums | None:
        """Of the whole buffer; None if they were not wanted, or some part has taken in nothing."""

    @property
    def above(self) -> Above | None:
        """As `sums`; None also if there was no room."""


class Moving(NamedTuple):
    """Momentum on the way into a buffer (see `feedback.MomentumCorrection`)."""

    velocity: Array
    """Like the buffer; it is changed."""
    momentum: float
    nesterov: bool


class Selection(NamedTuple):
    """What a compressor chose from a bucket."""

    indices: Array
    """int64, ascending, unique, at most the bucket's capacity."""
    found: int
    """How many entries qualified; more than `len(indices)` when the message has no room for all of them."""


class Ops(Protocol):
    """The verbs. Thresholds are compared strictly: an entry is above t when |x_i| > t, so zeros are never above."""

    def zeros(self, count: int, dtype: str, like: Array) -> Array:
        """A residual of `count` zeros of `dtype` ("float32" or "float64") on the device of `like`."""

    def accumulate(self, residual: Array, gradient: Array) -> None:
        """residual += gradient, in place; `gradient` has any shape, float type and strides, and is left as it is."""

    def notes(self, buffer: Array, wanted: Wanted) -> Notes | None:
        """For `absorb`, in one step; None if it finds out nothing on its way."""

    def absorb(
        self,
        buffer: Array,
        gradients: Sequence[Part],
        notes: Notes | None = None,
        moving: Moving | None = None,
    ) -> list[int]:
        """Take gradients into their parts of a buffer, in place.

        As `accumulate`, but entries that are not finite in the buffer's type add nothing, and sums that leave the range of that
        type stay at its largest number. Returns how many entries of each gradient are one or the other. ValueError, if a
        gradient reaches beyond the buffer.
        """

    def measure(self, x: Array) -> Sums:
        """Sums of x, accumulated in float64."""

    def assign(self, residual: Array, gradient: Array) -> None:
        """residual = gradient, in place; `gradient` as in `accumulate`, or another framework's on the host."""

    def copy(self, array: Array) -> Array:
        """A copy that shares no memory with `array`, of the same shape."""

    def all_finite(self, array: Array) -> bool:
        """Whether the array (any shape) holds neither NaN nor infinity."""

    def moments(self, x: Array, threshold: float, *, with_log: bool = False) -> Moments:
        """Statistics of the excesses over `threshold` >= 0, accumulated in float64."""

    def counts(self, x: Array, thresholds: list[float]) -> list[int]:
        """How many entries are above each threshold."""

    def max_abs(self, x: Array) -> float:
        """The largest magnitude; 0 for an empty array."""

    def norm(self, x: Array) -> float:
        """The Euclidean norm, accumulated in float64."""

    def select_above(self, x: Array, threshold: float, capacity: int) -> Selection:
        """The entries above `threshold` (all of them if it is negative), or the `capacity` largest of those."""

    def select_largest(self, x: Array, count: int) -> Selection:
        """The `count` entries of largest magnitude; among equals the lowest indices. 1 <= count <= len(x)."""

    def kth_largest(self, x: Array, count: int) -> float:
        """The smallest of the `count` largest magnitudes. 1 <= count <= len(x)."""

    def indices(self, host: Any, like: Array) -> Array:
        """Indices, a NumPy array of int64, on the device of `like`."""

    def union(self, parts: list[Array]) -> Array:
        """The indices (int64, ascending, unique) that are in any of some arrays of indices; negative ones are padding."""

    def concatenate(self, arrays: list[Array]) -> Array:
        """One after the other."""

    def pick(self, indices: Array, positions: Array) -> Array:
        """indices[positions], as int64."""

    def numbers(self, array: Array) -> list[float]:
        """The entries of a short array as Python numbers, exactly."""

    def take(self, x: Array, indices: Array) -> Array:
        """Return x[indices] rounded to float32 and subtract it from x, so that sent + kept is x exactly."""

    def pack(self, indices: Array, values: Array, capacity: int) -> Array:
        """The message of pairs of `horovod_sparse.wire`: int32, shape (capacity, 2)."""

    def pack_not_finite(self, x: Array, capacity: int) -> Array:
        """The message, on the device of `x`, that says that this rank's gradient holds NaN or infinity."""

    def rows_in_use(self, indices: Array, world: int, numel: int) -> list[int | None]:
        """Of each of `world` messages how many of its indices come before its padding; None if `wire.flaw` finds one.

        `indices` are those of all messages (int32, of any stride), in a bucket of `numel`. -2 (`wire.NOT_FINITE`) if a
        message is that of `pack_not_finite`. A device is waited for once.
        """

    def unpack(self, message: Array, used: int) -> tuple[Array, Array]:
        """Indices (int64) and values (float32) of the first `used` rows of one rank's message of pairs."""

    def pack_values(self, values: Array, length: int, tail: list[float]) -> Array:
        """`values`, zeros up to `length`, and the numbers of `tail`, in the values' own type."""

    def pack_indices(self, indices: Array, header: list[int], capacity: int) -> Array:
        """int32: the numbers of `header`, then indices, then padding up to `capacity`."""

    def split(self, gathered: Array, world: int) -> list[Array]:
        """The messages of all ranks, in rank order, out of one gathered array; ValueError unless it has `world` equal parts."""

    def scatter_add(self, target: Array, indices: Array, values: Array) -> None:
        """target[indices] += values, in place; indices are unique. On the host IndexError, before any change, out of range."""

    def assembler(self, messages: Array, used: list[int], divisor: float) -> Callable[[Sequence[Part]], None]:
        """A function of parts of a bucket, which become the sum of the messages' entries there.

        `messages` are those of pairs of `len(used)` workers, one after the other, of which the first `used` rows count. Values
        are divided by `divisor`, as float32, and added up from zero in the workers' order. Indices ascend; on the host
        IndexError, before a part is changed, unless they do there. A device is not waited for: `rows_in_use` has checked them.
        """
