"""What selects from a bucket on the device that the bucket lives on, while the host goes on. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from horovod_sparse.buckets import Layout
from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.feedback import MomentumCorrection
from horovod_sparse.ops import Array


class Selector(Protocol):
    """One bucket's selection, without the host.

    In a step `absorb` is called once for every parameter, then `select`; neither waits for the device. `finish` does, when
    the collective has been started. Until then the state is that of the step before; k is the step's.
    """

    def absorb(
        self,
        offset: int,
        gradient: Array | None,
        state: BucketState,
        k: int,
        *,
        velocity: Array | None = None,
        correction: MomentumCorrection | None = None,
    ) -> None:
        """As `Ops.absorb`, for the parameter that begins at `offset`; None is a gradient of zeros.

        Velocities are those of the whole bucket.
        """

    def select(self, state: BucketState, k: int, capacity: int) -> Array:
        """The message of pairs (`wire`, message 1); what is in it is no longer in the residual."""

    def finish(self, state: BucketState, k: int) -> dict[str, float]:
        """Wait, let the state learn from the step, and tell of it.

        Among others, "found": how many entries qualified, "sent": how many are in the message, "not_finite": how many of the
        gradients' entries were left out; if any were, nothing was sent or learned.
        """

    def not_finite(self) -> list[int]:
        """The offsets of the parameters whose gradients in this step held NaN or infinity; may wait."""

    def forget(self) -> None:
        """The residual was changed by others, or the state was: what was seen in earlier steps says nothing of the next one."""


SelectorFor = Callable[[Compressor, Layout, Array], Selector | None]
"""Gives a new bucket's selector, for its residual; None to select by the array verbs."""


def by_verbs(compressor: Compressor, layout: Layout, buffer: Array) -> None:
    """No bucket has a selector."""
