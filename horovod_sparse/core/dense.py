"""A bucket of parameters that are reduced dense, and its step. Imports no framework."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from horovod_sparse.core.intake import Terms
from horovod_sparse.core.layout import Layout
from horovod_sparse.exchange.cost import allreduce_bytes
from horovod_sparse.exchange.protocols import Asked, Collective, Entries, Exchange, Exchanging, Reduced, Round, Told
from horovod_sparse.ops.protocol import Array, Moving, Ops


class DenseBucket:
    """Parameters whose gradients are summed by one allreduce, in the type that residuals have.

    With momentum before the selection they get theirs after the reduction. `velocity` is the same on all ranks.
    """

    def __init__(self, ops: Ops, layout: Layout, world: int, rank: int, like: Array, velocity: Array | None) -> None:
        self.ops, self.layout, self.rank = ops, layout, rank
        self.name = layout.name
        self.slots = {slot.name: slot for slot in layout.slots}
        self.velocity = velocity
        self.bytes_sent = allreduce_bytes(layout.numel * np.dtype(layout.residual_dtype).itemsize, world)
        """In each step."""
        self._like = like

    def rounds_of(self, exchange: Exchange) -> list[Round]:
        """Return the one collective, whatever other buckets do."""
        return [Round("allreduce", self.layout.numel, None)]

    def zeros(self, count: int) -> Array:
        """Return zeros of the bucket's type, on its device."""
        return self.ops.zeros(count, self.layout.residual_dtype, self._like)


class DenseSending:
    """A `DenseBucket` in one step. The arguments are those of `core.sending.Sending`."""

    def __init__(self, bucket: DenseBucket, terms: Terms) -> None:
        self.bucket, self.layout, self.name, self.rank = bucket, bucket.layout, bucket.name, bucket.rank
        self._terms = terms
        self.missing = len(bucket.slots)
        """How many gradients have not arrived yet."""
        self._gradients: dict[str, Array] = {}
        self._is_spoiled = False
        self.rounds = 0
        """Collectives begun in this step."""
        self._run = self._collectives()
        self._total: Array | None = None
        """The sum of all ranks' gradients, once it is there; at last, what momentum makes of their mean."""
        self._divisor: float | None = None
        """What that is divided by; None for the divisor of sums."""
        self.fails = False
        """Whether that is there, and not finite."""

    def add(self, name: str, gradient: Array | None, rate: float | None) -> None:
        """Remember a gradient until the message is made."""
        self.missing -= 1
        if gradient is not None:
            prepare = self._terms.prepare
            self._gradients[name] = gradient if prepare is None else prepare(gradient, self.layout.residual_dtype)

    def spoil(self) -> None:
        """Let this rank's message be NaN, because it gives the step up. Call it before `begin`."""
        self._is_spoiled = True

    def begin(self) -> Collective:
        """Return the collective of a complete bucket. Its message is new memory, which an adapter may reduce in place."""
        self.rounds = 1
        first = next(self._run)
        assert isinstance(first, Collective)
        return first

    def _collectives(self) -> Exchanging:
        bucket, mine = self.bucket, self._gradients
        arrays = [mine[one.name] if one.name in mine else bucket.zeros(one.numel) for one in self.layout.slots]
        message = bucket.ops.joined(arrays, self.layout.residual_dtype)
        if self._is_spoiled:
            message[:] = math.nan
        total = self._total = yield Collective("allreduce", message)
        ((is_finite,),) = yield Told([bucket.ops.is_finite(total)])
        return Entries(None, total) if is_finite else None

    def advance(self, answer: Any) -> Asked | None:
        """See `core.sending.Sending.advance`."""
        try:
            return self._run.send(answer)
        except StopIteration as end:
            self.fails = end.value is None
            return None

    def bad(self) -> list[str]:
        """Return the parameters whose gradients were not finite on this rank."""
        return [name for name, gradient in self._gradients.items() if not self.bucket.ops.all_finite(gradient)]

    def reduced(self, divisor: float) -> Reduced:
        """Return the reduced gradients, once the step has ended."""
        total: Array = self._total
        divisor = divisor if self._divisor is None else self._divisor
        return Reduced(self.bucket.ops, Entries(None, total if divisor == 1.0 else total / divisor), 1.0, {})

    def commit(self) -> None:
        """End a step that has succeeded on all ranks. With momentum before the selection the gradients get theirs now."""
        bucket, (momentum, _, scale, divisor) = self.bucket, self._terms
        if bucket.velocity is not None and momentum is not None:
            total: Array = self._total
            mean, moved = total / (divisor * scale), bucket.zeros(self.layout.numel)
            bucket.ops.accumulate(moved, [(0, mean)], Moving(bucket.velocity, momentum))
            self._total, self._divisor = moved, 1.0 / scale

    def undo(self) -> None:
        """Nothing is to be undone."""
