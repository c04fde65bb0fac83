"""What selects on a bucket's own device, as `core.sending.DeviceSending` sees it. Imports no framework.

Tested by tests/kernels/gpu/test_bucket.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.core.layout import Layout
from horovod_sparse.core.plan import Stage
from horovod_sparse.ops.protocol import Array, Part, Selection


class Outcome(NamedTuple):
    """What became of a selection."""

    sent: int = 0
    """Entries in the message."""
    truncated: int = 0
    """Entries that qualified, but for which the message had no room."""
    not_finite: Sequence[int] = ()
    """The offsets of the parameters whose gradients held NaN or infinity, or overflowed the residual. Then nothing was sent."""


class Selector(Protocol):
    """Takes gradients into one bucket and gives messages out, on the bucket's device, for which the host does not wait.

    In a step `accumulate` is called for all parameters, a few at a time, then `decide`, `message`, `index_message` or `select`,
    if anything is selected, and `finish` at the end.
    """

    @property
    def numbers(self) -> Array:
        """What the device knows of the selection: a flat array there, for `finish`."""

    def begin(self, state: BucketState, stage: Stage) -> None:
        """Begin a step."""

    def accumulate(self, gradients: Sequence[Part], momentum: float | None, rate: float) -> None:
        """Add gradients to the residual, through the velocity if there is a momentum, as `Ops.accumulate` does.

        None stands for no gradient: what is known of the parameter is of the step before.
        """

    def decide(self, *, gives_up: bool) -> None:
        """Find out whether all gradients were finite, and what is to be selected: nothing if this rank gives the step up."""

    def message(self) -> Array:
        """Select, and return the message of pairs (`wire`, message 1). Its entries are no longer in the residual."""

    def select(self) -> Selection:
        """Return a selection that needs no look at the entries. Nothing is taken."""

    def index_message(self, checksum: int) -> Array:
        """Select, and return message 3 of `wire` with this checksum. Nothing is taken."""

    def union(self, gathered: Array, world: int) -> tuple[Array, Array]:
        """Return all indices in the messages 3 of so many ranks, their number and all headers: see `protocols.Sender`."""

    def take_out(self, indices: Array, length: int, checksum: int | None) -> tuple[Array, Array]:
        """Return the message of pairs of these indices, and message 2 with the values: see `protocols.Sender.value_message`.

        They are no longer in the residual. Nothing is taken if a gradient was not finite, or the step is given up.
        """

    def whole(self, checksum: int | None) -> Array:
        """Return message 2 with all entries. Nothing is taken."""

    def finish(self, numbers: Sequence[float]) -> Outcome:
        """Return what became of the selection, of which the host has learned the numbers. The state learns from them."""

    def forget(self) -> None:
        """Forget what was seen before, because the residual or the state was changed from outside, or the step was given up."""


DeviceSelectorFor = Callable[[Compressor, Layout, Array, Array | None], Selector | None]
"""Returns what selects on the device of a new bucket with this residual and velocity, or None if the host does."""
