"""What a backend is, and the one that all others are held to. Imports no framework, so that scenarios can use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from horovod_sparse.numpy.ops import NumpyOps
from horovod_sparse.ops.protocol import Ops
from tests.harness.worker import Worker


@dataclass(frozen=True)
class Backend:
    name: str
    ops: Ops
    array: Callable[[np.ndarray], Any]
    """A copy of a NumPy array in the backend."""
    numpy: Callable[[Any], np.ndarray]
    worker: Callable[..., Worker] = Worker

    def __str__(self) -> str:
        return self.name


def noted(ops: Ops, tracked: Any, question: str, x: Any) -> Any:
    """What is known of an array without a pass over it; None if nothing is."""
    with patch.object(ops, question, return_value=None):
        return getattr(tracked, question)(x)


ORACLE = Backend("numpy", NumpyOps(), np.array, np.asarray)
"""Held to all laws; the others are held to it."""
