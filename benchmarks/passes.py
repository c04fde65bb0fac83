"""Counts how often selections read whole buckets, beside the pass that adds the gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from horovod_sparse.torch.compiled import tensor_ops

_READING = ("extent", "measure", "select_above", "select_largest", "sampled_largest")


class Passes:
    """Counts calls of operations that read a residual. Where they read a part of it, that part counts.

    A sample counts as a pass: a pass takes as long as its memory, and a sample reads most lines of it.
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.sizes: Mapping[int, int] = {}
        """The numbers of entries of the buckets, by the addresses of their residuals."""
        kind = type(tensor_ops())
        for name in _READING:
            setattr(kind, name, self._counted(getattr(kind, name)))

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def counted(ops: Any, x: Any, *given: Any, **named: Any) -> Any:
            before = self.count
            result = operation(ops, x, *given, **named)
            # One operation may call another one.
            numel = self.sizes.get(x.untyped_storage().data_ptr())
            self.count = before if numel is None else before + len(x) / numel
            return result

        return counted


def sizes_of(compression: Any) -> dict[int, int]:
    """Return the `Passes.sizes` of a compressor of PyTorch that has made a step."""
    buckets = compression.source.driver.feedback.compressed
    return {one.buffer.untyped_storage().data_ptr(): one.numel for one in buckets}
