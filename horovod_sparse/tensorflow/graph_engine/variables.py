"""The variables of the graph, and what is read from them and assigned to them on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.core.layout import Layout
from horovod_sparse.tensorflow.memory import make_variable

Tensor = Any
Variable = Any


def make_flat(layout: Layout, kind: str, device: str | None) -> Variable:
    """Make a variable of zeros for a layout."""
    return make_variable(np.zeros(layout.numel, layout.residual_dtype), f"{layout.name}/{kind}", device)


def write(variable: Variable, indices: Tensor, values: Tensor) -> Any:
    """Return the operation that writes values at some indices of a flat variable."""
    return variable.scatter_update(tf.IndexedSlices(values, indices))


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
