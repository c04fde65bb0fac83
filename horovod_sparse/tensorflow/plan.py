"""How the gradients of some variables are reduced: in buckets, dense or sparse. A plan can be sent to other workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovod_sparse.core.layout import Layout


@dataclass(frozen=True)
class Plan:
    """The plan for the variables that had their first gradient in the same step."""

    buckets: list[Layout]
    dense: list[Layout]
    """The layouts of variables that are reduced dense. Each holds one of them."""
    sparse: list[str]
    """The names of variables with sparse gradients."""
    dtypes: dict[str, Any]
    """The dtypes of the gradients of all these variables, by name."""

    def as_json(self) -> dict[str, Any]:
        """Return the plan as lists, numbers and strings."""
        return {
            "buckets": [_layout_as_json(layout) for layout in self.buckets],
            "dense": [_layout_as_json(layout) for layout in self.dense],
            "sparse": self.sparse,
            "dtypes": {name: dtype.name for name, dtype in self.dtypes.items()},
        }

    @classmethod
    def of_json(cls, plan: Mapping[str, Any]) -> Plan:
        """Return the plan that `as_json` has written."""
        return cls(
            [_layout_of_json(layout) for layout in plan["buckets"]],
            [_layout_of_json(layout) for layout in plan["dense"]],
            plan["sparse"],
            {name: tf.as_dtype(dtype) for name, dtype in plan["dtypes"].items()},
        )


def _layout_as_json(layout: Layout) -> list[Any]:
    return [[[slot.name, list(slot.shape)] for slot in layout.slots], layout.residual_dtype]


def _layout_of_json(layout: list[Any]) -> Layout:
    shapes, residual_dtype = layout
    return Layout.of([(name, tuple(shape)) for name, shape in shapes], residual_dtype)


def first_collective(plans: Sequence[Plan], names: Sequence[str]) -> str | None:
    """Return the collective that a step of these variables begins with; None if no variable is planned yet."""
    buckets = [layout for plan in plans for layout in plan.buckets]
    number_of = {slot.name: number for number, layout in enumerate(buckets) for slot in layout.slots}
    for name in names:
        if name in number_of:
            return f"{number_of[name]}.0"
    if any(slot.name in names for plan in plans for layout in plan.dense for slot in layout.slots):
        return "dense.0"
    sparse = [name for plan in plans for name in plan.sparse]
    return next((f"sparse.{number}.values" for number, name in enumerate(sparse) if name in names), None)
