"""Describes one step for the engine that reduces it: what is known while the graph is built."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovod_sparse.core.layout import Layout

Tensor = Any

_PACK_BYTES = 2**20
"""Gradients that are reduced dense share messages of up to this many bytes. A larger one is sent alone, uncopied."""


@dataclass(frozen=True)
class Pack:
    """Parameters that are reduced dense in one message: one collective per small parameter would take longer than its data."""

    dtype: Any
    """The dtype of their gradients."""
    shapes: dict[str, tuple[int, ...]]
    """The parameters' shapes by name."""

    @property
    def names(self) -> list[str]:
        return list(self.shapes)

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes.values()]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the parts' tensors, flattened and concatenated."""
        return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the tensor of each part, in its shape, by name."""
        pieces = zip(self.shapes.items(), tf.split(flat, self.sizes), strict=True)
        return {name: tf.reshape(piece, shape) for (name, shape), piece in pieces}


@dataclass(frozen=True)
class Step:
    """The gradients of one step and how they are reduced."""

    buckets: Sequence[Layout]
    """The buckets that take part."""
    gradients: Mapping[str, Tensor]
    """Gradients of the parameters in the buckets, by name. A missing gradient counts as zero."""
    dense: Mapping[str, Tensor]
    """Gradients of the parameters that are reduced dense, by name."""
    others: Mapping[str, Tensor]
    """Values, by name, that are already reduced and only have to be finite."""
    dtypes: Mapping[str, Any]
    """The dtypes of the gradients of all parameters, by name."""
    rate: Tensor
    """The learning rate, float64; NaN if it is unknown."""
    scale: Tensor
    """The loss scale by which the gradients are multiplied, float64; NaN if there is no loss scaler."""
    op: Any
    """Horovod's reduction operation for the dense gradients."""
    predivide: float
    """`gradient_predivide_factor`, for the dense gradients."""
    frozen: Collection[str] = ()
    """Names of parameters that are not trained any more; their residuals and velocities are dropped."""

    def packs(self) -> list[Pack]:
        """Return the parameters that are reduced dense, grouped by message."""
        packs: list[Pack] = []
        for name, gradient in self.dense.items():
            room = _PACK_BYTES // gradient.dtype.size - gradient.shape.num_elements()
            if not packs or packs[-1].dtype != gradient.dtype or sum(packs[-1].sizes) > room:
                packs.append(Pack(gradient.dtype, {}))
            packs[-1].shapes[name] = tuple(gradient.shape)
        return packs
