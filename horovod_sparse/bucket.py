"""One bucket on this rank: its memory, its adaptive state, and the step that it is in. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from horovod_sparse.buckets import Layout
from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.exchanges import Collective, Sent, Task
from horovod_sparse.ops import Array, Notes, Ops
from horovod_sparse.selector import Selector
from horovod_sparse.statistics import Counts, Tally

_SAME_FACTOR = 1e-6
"""Relative difference of two factors that are the same but for rounding."""


@dataclass
class Before:
    """What a bucket was before a step, as far as the step may have to be given up."""

    state: dict[str, object]
    tally: Tally
    residual: Array | None = None
    """A copy, with `discardable`; so is the velocity."""
    velocity: Array | None = None


@dataclass
class Bucket:
    """The state of one bucket on this rank."""

    layout: Layout
    buffer: Array
    """Residual plus the gradients that have arrived in this step."""
    velocity: Array | None
    """With momentum correction."""
    state: BucketState
    missing: set[str] = field(default_factory=set)
    """Parameters whose gradient has not arrived in this step."""
    notes: Notes | None = None
    """What the gradients of this step that have arrived have shown of the buffer."""
    noted: bool = False
    """Whether notes were asked for in this step."""
    finite: bool = True
    """Whether all gradients of this step are."""
    selector: Selector | None = None
    """Selects on the device; without one the array verbs do."""
    task: Task | None = None
    """The exchange of this step, and below it the generator that carries it out and the bytes that it has sent."""
    exchange: Generator[Collective, Any, Sent] | None = None
    bytes_sent: float = 0.0
    rounds: int = 0
    """Collectives begun in this step."""
    counts: Counts | None = None
    """Of this step, until it succeeds."""
    tally: Tally = field(default_factory=Tally)
    truncated_steps: int = 0
    """The last so many steps have each found more entries than the message has room for."""
    in_step: bool = False
    before: Before | None = None
    """Of this step, or of the last one between two steps."""
    factor: float | None = None
    """What the residual was multiplied by in this step, with `lr_in_residual`; None before it is known."""
    mixed_factors: bool = False
    """Whether it differs between the parameters."""

    @property
    def name(self) -> str:
        return self.layout.name

    def name_at(self, offset: int) -> str:
        """Of the parameter that begins there."""
        return next(slot.name for slot in self.layout.slots if slot.offset == offset)

    def forget(self) -> None:
        """What was seen of the buffer says nothing of it any more."""
        self.notes = None
        if self.selector is not None:
            self.selector.forget()

    def open(self, ops: Ops, *, discardable: bool) -> None:
        """A step begins with the first gradient."""
        self.in_step = True
        self.factor, self.mixed_factors = None, False
        old, self.before = self.before, Before(self.state.state_dict(), self.tally)
        if discardable:
            self.before.residual = _copy(ops, self.buffer, old and old.residual)
            if self.velocity is not None:
                self.before.velocity = _copy(ops, self.velocity, old and old.velocity)

    def change_unit(self, factor: float) -> None:
        """A parameter's residual was multiplied by `factor` in this step; thresholds and controllers must follow."""
        if self.factor is None:
            self.factor = factor
            if factor != 1.0:
                self.forget()
                self.state.rescale(factor)
        elif not math.isclose(factor, self.factor, rel_tol=_SAME_FACTOR):
            self.mixed_factors = True

    def start_again(self, compressor: Compressor) -> None:
        """The algorithm begins afresh, in the same step: nothing that it knew of the residual holds."""
        step = self.state.step
        self.state = compressor.new_state(self.state.place)
        self.state.step = step
        self.forget()

    def end(self, *, succeeded: bool) -> None:
        """The step has ended: what was taken is sent, or returns to the residual."""
        if self.task is not None:
            if succeeded:
                self.task.succeed()
            else:
                self.task.fail()
        if succeeded and self.counts is not None:
            self.tally = self.tally.with_step(self.counts)
            self.truncated_steps = self.truncated_steps + 1 if self.counts.overflow else 0
        self._close()

    def give_up(self, ops: Ops, compressor: Compressor) -> None:
        """The step ends here, whatever it had reached: see `Pipeline.abort`."""
        if self.task is not None:
            self.task.fail()
        self._close()
        self.bring_back(ops, compressor)

    def bring_back(self, ops: Ops, compressor: Compressor) -> None:
        """Be as before the step; without `discardable` the arrays stay what they are, and the rest fits them."""
        before, self.before = self.before, None
        assert before is not None
        self.forget()
        self.state.load_state_dict(before.state)
        self.tally = before.tally
        if before.residual is not None:
            ops.assign(self.buffer, before.residual)
            if self.velocity is not None:
                ops.assign(self.velocity, before.velocity)
        elif self.mixed_factors:
            self.start_again(compressor)
        elif self.factor is not None and self.factor != 1.0:
            self.state.rescale(self.factor)

    def _close(self) -> None:
        self.in_step = False
        self.missing = {slot.name for slot in self.layout.slots}
        self.notes, self.noted = None, False
        self.finite = True
        self.task = self.exchange = self.counts = None


def _copy(ops: Ops, array: Array, memory: Array | None) -> Array:
    """A copy of an array, in memory that held an older one if there is some."""
    if memory is None:
        return ops.copy(array)
    ops.assign(memory, array)
    return memory
