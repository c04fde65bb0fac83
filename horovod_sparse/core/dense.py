"""A bucket of parameters that are reduced dense, from gradients to reduced gradients. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from horovod_sparse.core.intake import Arrived, Intake
from horovod_sparse.core.layout import Layout
from horovod_sparse.exchange.cost import allreduce_bytes
from horovod_sparse.exchange.protocols import Collective, Entries, Exchange, Reduced, Round, Sent
from horovod_sparse.ops.protocol import Array, Moving, Ops


def arriving(missing: set[str], name: str) -> None:
    """Note that a parameter's gradient arrives. Raise RuntimeError if it has arrived before."""
    if name not in missing:
        raise RuntimeError(f"the gradient of {name!r} arrived twice in one step")
    missing.discard(name)


class DenseBucket:
    """Parameters whose gradients are summed by one allreduce, in the type that residuals have.

    With momentum before the selection they get theirs after the reduction. `velocity` is the same on all ranks.
    """

    def __init__(self, ops: Ops, layout: Layout, world: int, rank: int, like: Array, velocity: Array | None) -> None:
        self.ops = ops
        self.layout = layout
        self.name = layout.name
        self.slots = {slot.name: slot for slot in layout.slots}
        self.rank = rank
        self.bytes_sent = allreduce_bytes(layout.numel * np.dtype(layout.residual_dtype).itemsize, world)
        """In each step."""
        self._like = like
        self._velocity = velocity
        self.close()

    def close(self) -> None:
        """Forget the step that has ended."""
        self.missing = set(self.slots)
        self.rounds = 0
        self._gradients: dict[str, Array] = {}
        self._spoiled = False
        self._total: Array | None = None
        """The sum of all ranks' gradients, once it is there; at last, what momentum makes of their mean."""
        self._divisor: float | None = None
        """What that is divided by; None for the divisor of sums."""

    def rounds_of(self, exchange: Exchange) -> Sequence[Round]:
        """Return the one collective, whatever other buckets do."""
        return [Round("allreduce", self.layout.numel, None)]

    def begin_step(self) -> None:
        """Begin a step, when its first gradient arrives."""

    def spoil(self) -> None:
        """Let this rank's message be NaN, because it gives the step up. Call it before `begin`."""
        self.missing.clear()
        self._spoiled = True

    def take_in(self, arrived: Sequence[Arrived], rates: Sequence[float], intake: Intake) -> None:
        """Remember gradients until the message is made. Raise RuntimeError if one has arrived before."""
        for name, gradient, _ in arrived:
            arriving(self.missing, name)
            if gradient is not None:
                self._gradients[name] = intake.prepared(gradient, self.layout.residual_dtype)

    def begin(self) -> Collective:
        """Return the collective of a complete bucket. Its message is new memory, which an adapter may reduce in place."""
        self.rounds, dtype = 1, self.layout.residual_dtype
        arrays = [
            self._gradients[name] if name in self._gradients else self.ops.zeros(slot.numel, dtype, self._like)
            for name, slot in self.slots.items()
        ]
        message = self.ops.joined(arrays, dtype)
        if self._spoiled:
            message[:] = math.nan
        return Collective("allreduce", message)

    def advance(self, result: Array) -> NoReturn:
        """Raise StopIteration with the sum of all ranks' gradients."""
        raise StopIteration(Entries(None, result))

    def receive(self, sent: Sent) -> bool:
        """End the exchange with the sum of all ranks' gradients. Return whether it is finite."""
        assert isinstance(sent, Entries)
        self._total = sent.values
        return self.ops.all_finite(self._total)

    def bad(self) -> list[str]:
        """Return the parameters whose gradients were not finite on this rank."""
        return [name for name, gradient in self._gradients.items() if not self.ops.all_finite(gradient)]

    def reduced(self, divisor: float) -> Reduced:
        """Return the reduced gradients, once the step has ended."""
        divisor = divisor if self._divisor is None else self._divisor
        total: Array = self._total
        return Reduced(self.ops, Entries(None, total if divisor == 1.0 else total / divisor), 1.0, {})

    def _accelerate(self, mean: Array, velocity: Array, intake: Intake) -> Array:
        """Return what momentum makes of the mean gradients."""
        moved = self.ops.zeros(self.layout.numel, self.layout.residual_dtype, self._like)
        assert intake.momentum is not None
        self.ops.accumulate(moved, [(0, mean)], Moving(velocity, intake.momentum))
        return moved

    def commit(self, divisor: float, intake: Intake) -> None:
        """End a step that has succeeded on all ranks. With momentum before the selection the gradients get theirs now."""
        if self._velocity is not None:
            mean: Array = self._total
            self._total = self._accelerate(mean / (divisor * intake.scale), self._velocity, intake)
            self._divisor = 1.0 / intake.scale

    def undo(self, intake: Intake) -> None:
        """Nothing is to be undone."""
