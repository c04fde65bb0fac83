"""One bucket of the graph on this rank, and what is done to its variables."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.compressors.base import BucketState
from horovod_sparse.core.layout import Layout
from horovod_sparse.core.statistics import Counts, Tally
from horovod_sparse.exchange import cost
from horovod_sparse.tensorflow.memory import make_variable

Variable = Any


@dataclass(frozen=True)
class GraphBucket:
    """One bucket on this rank. Everything that changes is held in variables."""

    layout: Layout
    k: int
    capacity: int
    residual: Variable
    velocity: Variable | None
    """With momentum correction; otherwise None."""
    state: BucketState
    """The state before the first step. The variables below hold what changes of it."""
    step: Variable
    saved: Mapping[str, Variable]
    """The algorithm's adaptive numbers, by name."""
    tally: Variable
    """Rows: the last step, the sums over all steps. Columns: steps, count, overflow, threshold."""

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return int(numpy(self.tally)[1, 0])

    def totals(self, stages: int, world: int) -> Tally:
        """Return the counts of the last step and of all steps, which had so many stages and workers."""
        sent = cost.allgather_bytes(8 * self.capacity, world)
        tally = numpy(self.tally)
        last, sums = (
            Counts(steps * self.k, count, overflow, threshold, steps * stages, steps * sent)
            for steps, count, overflow, threshold in tally.tolist()
        )
        return Tally(int(tally[1, 0]), last, sums)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of the residual."""
        return float(np.linalg.norm(numpy(self.residual).astype(np.float64)))

    def adaptive(self) -> dict[str, object]:
        """Return the adaptive state as the buckets of `Pipeline` do."""
        before: dict[str, Any] = self.state.state_dict()
        changed = {"step": self.step, **self.saved}
        return before | {name: type(before[name])(numpy(variable)) for name, variable in changed.items()}

    def state_from(self, adaptive: Mapping[str, Any]) -> BucketState:
        """Make a state from what `adaptive`, or a pipeline on the host, returned."""
        state = copy.deepcopy(self.state)
        state.load_state_dict(adaptive)
        return state

    def adapt(self, state: BucketState) -> None:
        """Continue from a state."""
        for name, variable in {"step": self.step, **self.saved}.items():
            assign(variable, getattr(state, name))


def make_flat(layout: Layout, kind: str, device: str | None) -> Variable:
    """Make a variable of zeros for a layout."""
    return make_variable(np.zeros(layout.numel, layout.residual_dtype), f"{layout.name}/{kind}", device)


def numpy(variable: Variable) -> Any:
    """Return a copy of the value."""
    with tf.init_scope():
        return np.array(variable.numpy())


def assign(variable: Variable, value: Any) -> None:
    """Assign a value from the host."""
    with tf.init_scope():
        variable.assign(tf.constant(value, variable.dtype))


def shapes(kept: Sequence[tuple[Layout, Variable]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters by name."""
    return {slot.name: slot.shape for layout, _ in kept for slot in layout.slots}


def arrays(kept: Sequence[tuple[Layout, Variable]]) -> dict[str, Any]:
    """Return the parts of all variables by parameter name."""
    return {
        slot.name: flat[slot.offset : slot.offset + slot.numel].reshape(slot.shape)
        for layout, flat in ((layout, numpy(variable)) for layout, variable in kept)
        for slot in layout.slots
    }


def load(kept: Sequence[tuple[Layout, Variable]], arrays: Mapping[str, Any]) -> None:
    """Assign what `arrays` returned."""
    for layout, variable in kept:
        parts = [np.asarray(arrays[slot.name]).reshape(-1) for slot in layout.slots]
        assign(variable, np.concatenate(parts).astype(layout.residual_dtype))
