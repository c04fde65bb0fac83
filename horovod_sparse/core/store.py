"""What serves one compressor: what lasts of its parameters, also of those that have no buckets yet. Imports no framework.

Tested by tests/core/test_state.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.core.state import (
    Shapes,
    check_state,
    empty_state,
    holds_anything,
    merged,
    names_in,
    part_of,
    rescale_state,
)
from horovod_sparse.core.statistics import NO_STATS, Stats
from horovod_sparse.core.step import Step

Settle = Callable[[str], None]
"""Called before anything is done between two steps, with the method's name. It ends a step that has begun, or raises."""


class Store:
    """Statistics and state of one model's gradients, between two steps. `core.driver.Driver` runs the steps.

    Args:
        compressor: settings and algorithm.
        settle: see `Settle`; None: the step is forgotten on this rank alone.
        place: which shard of a model is here; "" if there are none. A state belongs to its shard.
    """

    def __init__(self, compressor: Compressor, settle: Settle | None = None, place: str = "") -> None:
        self.compressor = compressor
        self._settle = (lambda *_: self.drop()) if settle is None else settle
        self._place = place
        self.feedback: Feedback | None = None
        """None until the first parameters have buckets."""
        self.step: Step | None = None
        """The step that has begun; None between two steps."""
        self.deferred: Mapping[str, Any] | None = None
        """A copy of the state of parameters that have no buckets yet; None if there is nothing in it."""
        self.sparse: Collection[str] = ()
        """The names of the parameters with sparse gradients, which have no state."""

    def drop(self) -> None:
        """Forget the step that has begun, if there is one, on this rank alone. It has never been."""
        step, self.step = self.step, None
        if step is not None:
            step.abandon()

    def check(self, state: Mapping[str, Any], shapes: Shapes) -> None:
        """Raise ValueError unless a state fits parameters of these shapes, without those that have sparse gradients."""
        if holds_anything(state):
            check_state(state, self.compressor, shapes)

    def stats(self) -> Stats:
        """Return counts, bytes and residual norms: see `Feedback.stats`."""
        return NO_STATS if self.feedback is None else self.feedback.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return what lasts, what is deferred, and the names of the parameters with sparse gradients."""
        self._settle("state_dict")
        state = copy.deepcopy(dict(self.deferred or empty_state()))
        if self.feedback is not None:
            state = merged({**self.feedback.state_dict(), "sparse": sorted(self.sparse)}, state)
        return {**state, "shard": self._place} if self._place else state

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state that `check_parts` accepts, in place of the old one. Nothing is changed if it is refused."""
        theirs = state.get("shard", "a model that is not sharded")
        if self._place and theirs != self._place:
            raise ValueError(
                f"state must be that of shard {self._place}, got that of {theirs}: residuals belong to a shard; use as many "
                "shards as when it was saved, and load on each rank what a rank with its shard has saved"
            )
        self._settle("load_state_dict")
        self.load_part(state, names_in(state))

    def load_part(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Load the part of a state that belongs to `names`, and defer the rest. Without buckets, everything is deferred."""
        if self.feedback is not None:
            self.feedback.load_state_dict(part_of(state, names))
            state = part_of(state, names_in(state).difference(names))
        self.defer(state)

    def defer(self, state: Mapping[str, Any]) -> None:
        """Keep a copy of the state of parameters that have no buckets yet."""
        self.deferred = copy.deepcopy(dict(state)) if holds_anything(state) else None

    def rescale(self, factor: float) -> None:
        """Multiply residuals and velocities by `factor`."""
        self._settle("rescale")
        if self.deferred is not None:
            self.deferred = rescale_state(self.deferred, self.compressor, factor)
        if self.feedback is not None:
            self.feedback.rescale(factor)

    def reset(self) -> None:
        """Forget residuals, adaptive state and statistics."""
        self._settle("reset")
        self.deferred = None
        if self.feedback is not None:
            self.feedback.reset()
