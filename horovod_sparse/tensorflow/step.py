"""One step as an engine reduces it: what is known while the graph is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tensor = Any


@dataclass(frozen=True)
class Step:
    """The gradients of one step and how they are reduced."""

    buckets: Sequence[Any]
    """The engine's, those that take part."""
    gradients: Mapping[str, Tensor]
    """Of the parameters in the buckets, by name; those that are left out count as zero."""
    dense: Mapping[str, Tensor]
    """Gradients of the parameters that are reduced dense, by name."""
    others: Mapping[str, Tensor]
    """Values, by name, that have been reduced already and only have to be finite."""
    dtypes: Mapping[str, Any]
    """Of the gradients of all parameters, by name."""
    rate: Tensor
    """The learning rate, float64; NaN where nobody knows it."""
    op: Any
    """Horovod's, for the dense ones."""
    divisor: float
    """What sums of compressed gradients are divided by."""
    predivide: float
    """`gradient_predivide_factor`, for the dense ones."""
