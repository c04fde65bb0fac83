"""One step as an engine reduces it: what is known while the graph is built."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

Tensor = Any

_PACK_BYTES = 2**20
"""Gradients that are reduced dense share a message of so many bytes; a larger one has its own, for which it is not copied."""


@dataclass(frozen=True)
class Part:
    """A parameter in a pack."""

    name: str
    shape: tuple[int, ...]
    numel: int


@dataclass(frozen=True)
class Pack:
    """Parameters that are reduced dense in one message: a collective for every small one would take longer than its data."""

    dtype: Any
    """Of their gradients."""
    parts: list[Part]

    @property
    def names(self) -> list[str]:
        return [part.name for part in self.parts]

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The parts' tensors, flat, one after the other."""
        return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensor of each part, in its shape, by name."""
        pieces = tf.split(flat, [part.numel for part in self.parts])
        return {part.name: tf.reshape(piece, part.shape) for part, piece in zip(self.parts, pieces, strict=True)}


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
    frozen: Collection[str] = ()
    """Names of parameters that are not trained any more; what waits for them is dropped."""

    def packs(self) -> list[Pack]:
        """The parameters that are reduced dense, by the message that each is in."""
        packs: list[Pack] = []
        for name, gradient in self.dense.items():
            part = Part(name, tuple(gradient.shape), gradient.shape.num_elements())
            last = packs[-1] if packs else None
            if last and last.dtype == gradient.dtype and last.numel + part.numel <= _PACK_BYTES // gradient.dtype.size:
                last.parts.append(part)
            else:
                packs.append(Pack(gradient.dtype, [part]))
        return packs
