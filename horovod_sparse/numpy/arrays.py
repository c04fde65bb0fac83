"""Named arrays whose gradients are reduced: what they must be, and how they are written. Imports no framework except NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse import kernels
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.agreement import refuse_detached, refuse_updates
from horovod_sparse.core.layout import Parameter, Slot, planned
from horovod_sparse.core.pipeline import Pipeline, Write
from horovod_sparse.core.store import log_start
from horovod_sparse.exchange.protocols import Reduced

Array = NDArray[Any]
Shapes = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""The shape and the type of each array, by name."""

_TYPES = [np.dtype(one) for one in ("float16", "float32", "float64")]
"""Residuals of wider types would not hold what they are given."""


def check_compression(compression: object) -> None:
    """Raise TypeError or ValueError unless `compression` is a compressor that NumPy arrays can have."""
    if not isinstance(compression, Compressor):
        raise TypeError(f"compression must be a compressor such as TopK(ratio=0.01), got {compression!r}")
    refuse_updates(compression, "NumPy")
    refuse_detached(compression, "NumPy")


def arrays_of(gradients: Mapping[str, Array]) -> dict[str, Array]:
    """Return `gradients` as arrays. Raise TypeError unless they have names and are of floats that residuals can hold."""
    if not isinstance(gradients, Mapping):
        raise TypeError(
            f"gradients must be a mapping of names to arrays, such as {{'weights': gradient}}, got {type(gradients).__name__}"
        )
    arrays = {name: np.asarray(gradient) for name, gradient in gradients.items()}
    for name, array in arrays.items():
        if array.dtype not in _TYPES:
            raise TypeError(
                f"gradients[{name!r}] must be floating point, of type float16, float32 or float64, got {array.dtype}; "
                "convert it, for instance with astype(np.float64)"
            )
    return arrays


def shapes_of(gradients: Mapping[str, Array]) -> Shapes:
    """Return the shapes and types of arrays."""
    return {name: (gradient.shape, gradient.dtype) for name, gradient in gradients.items()}


def add_buckets(pipeline: Pipeline, gradients: Mapping[str, Array]) -> None:
    """Add the buckets of arrays like `gradients` to a new pipeline."""
    compressor = pipeline.compressor
    parameters = [
        Parameter(name, gradient.shape, compressor.residual_dtype_of(gradient), "cpu")
        for name, gradient in gradients.items()
    ]
    buckets, dense = planned(parameters, compressor, pipeline.world)
    pipeline.add_buckets(buckets, gradients.__getitem__)
    pipeline.add_dense(dense, gradients.__getitem__)
    log_start(pipeline, kernels.variant())


def writer(reduced: Mapping[str, Array]) -> Write:
    """Return what writes reduced gradients to the arrays `reduced`, which are contiguous."""
    # Half-precision sums are rounded once, at the end, not after every worker.
    wide = {
        name: np.empty(array.size, np.float32) if array.dtype == np.float16 else array.reshape(-1)
        for name, array in reduced.items()
    }

    def write(slots: Sequence[Slot], sent: Reduced) -> list[str]:
        sent.write([(slot.offset, wide[slot.name]) for slot in slots])
        halves = [slot.name for slot in slots if reduced[slot.name].dtype == np.float16]
        with np.errstate(over="ignore"):
            for name in halves:
                reduced[name][...] = wide[name].reshape(reduced[name].shape)
        return [name for name in halves if np.isinf(reduced[name]).any()]

    return write
