"""A bucket of parameters that are reduced dense, from gradients to reduced gradients. Imports no framework."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from horovod_sparse.core.intake import Arrived, Intake
from horovod_sparse.core.layout import Layout, Slot
from horovod_sparse.core.statistics import Tally
from horovod_sparse.core.step import Before, Ending
from horovod_sparse.exchange.cost import allreduce_bytes
from horovod_sparse.exchange.protocols import Collective, Entries, Exchange, Reduced, Round, Sent
from horovod_sparse.ops.protocol import Array, Momentum, Moving, Ops, Part


def arriving(missing: set[str], name: str) -> None:
    """Note that a parameter's gradient arrives. Raise RuntimeError if it has arrived before."""
    if name not in missing:
        raise RuntimeError(f"the gradient of {name!r} arrived twice in one step")
    missing.discard(name)


class DenseBucket:
    """Parameters whose gradients are summed by one allreduce, in the type that residuals have.

    With momentum before the selection they get theirs after the reduction. `velocity` is the same on all ranks.
    """

    stands_in = None
    begins_dense = False

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

    def rounds_of(self, exchange: Exchange) -> Sequence[Round]:
        """Return the one collective, whatever other buckets do."""
        return [Round("allreduce", self.layout.numel, None)]

    def begin_step(self, *, copies: bool) -> Before:
        """Begin a step, when its first gradient arrives. Return what is needed to undo it."""
        return Before({}, Tally(), [] if self._velocity is None else [self.ops.copy(self._velocity)])

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
        return Collective("allreduce", self.ops.joined(arrays, dtype))

    def advance(self, result: Array) -> NoReturn:
        """Raise StopIteration with the sum of all ranks' gradients."""
        raise StopIteration(Entries(None, result))

    def conclude(self, sent: Sent, divisor: float, intake: Intake) -> tuple[Reduced, list[str], list[str]]:
        """Return the reduced gradients, and which of them are not finite, on all ranks. If one is not, no velocity changes."""
        assert isinstance(sent, Entries)
        total, bad = sent.values, []
        if not self.ops.all_finite(total):
            bad = [slot.name for slot in self.layout.slots if not self.ops.all_finite(self._part(total, slot))]
        elif self._velocity is not None:
            total, bad = self._accelerate(total / (divisor * intake.scale), self._velocity, intake)
            divisor = 1.0 / intake.scale
        reduced = Reduced(self.ops, Entries(None, total if divisor == 1.0 else total / divisor), 1.0, {})
        return reduced, [], [f"the gradient of parameter {name!r}" for name in bad]

    def _part(self, flat: Array, slot: Slot) -> Array:
        return flat[slot.offset : slot.offset + slot.numel]

    def _accelerate(self, mean: Array, velocity: Array, intake: Intake) -> tuple[Array, list[str]]:
        """Return what momentum makes of the mean gradients, and the parameters whose velocities overflow."""
        moved = self.ops.zeros(self.layout.numel, self.layout.residual_dtype, self._like)
        together = defaultdict[Momentum | None, list[Part]](list)
        for slot in self.layout.slots:
            together[intake.momentum(slot.name)].append((slot.offset, self._part(mean, slot)))
        overflowed: set[int] = set()
        for momentum, parts in together.items():
            assert momentum is not None
            numbers = self.ops.accumulate(moved, parts, Moving(velocity, momentum))
            overflowed |= {offset for (offset, _), number in zip(parts, numbers, strict=True) if number}
        return moved, [slot.name for slot in self.layout.slots if slot.offset in overflowed]

    def end(self, ending: Ending, before: Before) -> None:
        """End the step, so that it can be done again."""
        if ending is Ending.UNDONE and self._velocity is not None:
            self.ops.assign(self._velocity, before.copies[0])
