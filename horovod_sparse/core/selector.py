"""Selection from a bucket on the bucket's own device, while the host goes on. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.compressors.momentum import MomentumCorrection
from horovod_sparse.core.layout import Layout
from horovod_sparse.ops.protocol import Array


class Selector(Protocol):
    """Selects from one bucket without the host.

    In a step `absorb` is called once for every parameter, then `select`; neither waits for the device. `finish` waits. It
    is called when the collective has been started. Until then, `state` is that of the previous step. `k` is this step's.
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
        """Do as `Ops.absorb`, for the parameter that begins at `offset`. A gradient of None means zeros.

        `velocity` is that of the whole bucket.
        """

    def select(self, state: BucketState, k: int, capacity: int) -> Array:
        """Return the message of pairs (`wire`, message 1). Its entries are no longer in the residual."""

    def finish(self, state: BucketState, k: int) -> dict[str, float]:
        """Wait, let the state learn from the step, and return numbers about the step.

        Among them are "found" (how many entries qualified), "sent" (how many are in the message) and "not_finite" (how many of
        the gradients' entries were left out). If any were left out, nothing was sent or learned.
        """

    def not_finite(self) -> list[int]:
        """Return the offsets of the parameters whose gradients in this step held NaN or infinity. It may wait."""

    def forget(self) -> None:
        """Forget what was seen in earlier steps, because the residual or the state was changed from outside."""


SelectorFor = Callable[[Compressor, Layout, Array], Selector | None]
"""Returns the selector of a new bucket with this residual, or None to select by the array verbs."""


def by_verbs(compressor: Compressor, layout: Layout, buffer: Array) -> None:
    """Return None, so that no bucket has a selector."""
