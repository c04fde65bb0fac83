"""One bucket on this rank: its memory, its adaptive state and its current step. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.core.layout import Layout
from horovod_sparse.core.selector import Selector
from horovod_sparse.core.statistics import Counts, Tally
from horovod_sparse.exchange.protocols import Collective, Sent, Task
from horovod_sparse.ops.protocol import Array, Notes, Ops

_SAME_FACTOR = 1e-6
"""Largest relative difference of two factors that are equal except for rounding."""


@dataclass
class Before:
    """The state of a bucket before a step, kept in case the step is given up."""

    state: dict[str, object]
    tally: Tally
    residual: Array | None = None
    """A copy of the residual, with `discardable`; else None. The same holds for the velocity."""
    velocity: Array | None = None


@dataclass
class Bucket:
    """The state of one bucket on this rank."""

    layout: Layout
    buffer: Array
    """Residual plus the gradients that have arrived in this step."""
    velocity: Array | None
    """The velocity, with momentum correction; else None."""
    state: BucketState
    missing: set[str] = field(default_factory=set)
    """Parameters whose gradient has not arrived in this step."""
    notes: Notes | None = None
    """What is known about the buffer from the gradients that have arrived in this step."""
    noted: bool = False
    """Whether notes were asked for in this step."""
    finite: bool = True
    """Whether all gradients of this step are finite."""
    selector: Selector | None = None
    """Selects on the device; if None, the array verbs select."""
    task: Task | None = None
    """The exchange of this step. The next two fields are the generator that carries it out and the bytes that it has sent."""
    exchange: Generator[Collective, Any, Sent] | None = None
    bytes_sent: float = 0.0
    rounds: int = 0
    """Collectives begun in this step."""
    counts: Counts | None = None
    """Counts of this step, until it succeeds."""
    tally: Tally = field(default_factory=Tally)
    truncated_steps: int = 0
    """Number of consecutive steps, up to the last one, that found more entries than the message has room for."""
    in_step: bool = False
    before: Before | None = None
    """The state before this step or, between two steps, before the last one."""
    factor: float | None = None
    """The factor that the residual was multiplied by in this step, with `lr_in_residual`; None until it is known."""
    mixed_factors: bool = False
    """Whether the factor differs between the parameters."""

    @property
    def name(self) -> str:
        return self.layout.name

    def name_at(self, offset: int) -> str:
        """Return the name of the parameter that begins at `offset`."""
        return next(slot.name for slot in self.layout.slots if slot.offset == offset)

    def forget(self) -> None:
        """Forget what was seen of the buffer, because it no longer applies."""
        self.notes = None
        if self.selector is not None:
            self.selector.forget()

    def open(self, ops: Ops, *, discardable: bool) -> None:
        """Begin a step, when its first gradient arrives."""
        self.in_step = True
        self.factor, self.mixed_factors = None, False
        old, self.before = self.before, Before(self.state.state_dict(), self.tally)
        if discardable:
            self.before.residual = _copy(ops, self.buffer, old and old.residual)
            if self.velocity is not None:
                self.before.velocity = _copy(ops, self.velocity, old and old.velocity)

    def change_unit(self, factor: float) -> None:
        """Adapt thresholds and controllers after a parameter's residual was multiplied by `factor` in this step."""
        if self.factor is None:
            self.factor = factor
            if factor != 1.0:
                self.forget()
                self.state.rescale(factor)
        elif not math.isclose(factor, self.factor, rel_tol=_SAME_FACTOR):
            self.mixed_factors = True

    def start_again(self, compressor: Compressor) -> None:
        """Restart the algorithm within the same step, because nothing that it knew of the residual holds."""
        step = self.state.step
        self.state = compressor.new_state(self.state.place)
        self.state.step = step
        self.forget()

    def end(self, *, succeeded: bool) -> None:
        """End the step: what was taken is sent if it succeeded, else it returns to the residual."""
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
        """End the step at whatever point it has reached: see `Pipeline.abort`."""
        if self.task is not None:
            self.task.fail()
        self._close()
        self.bring_back(ops, compressor)

    def bring_back(self, ops: Ops, compressor: Compressor) -> None:
        """Go back to before the step. Without `discardable`, the arrays stay as they are and the rest is fitted to them."""
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
    """Return a copy of an array, in the memory of an older copy if there is one."""
    if memory is None:
        return ops.copy(array)
    ops.assign(memory, array)
    return memory
