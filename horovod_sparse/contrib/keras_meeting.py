"""Where the workers of a Keras model meet before they exchange, and by how much movements grow. Imports no framework.

Tested by tests/parallel/tf/local.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.contrib.lengths import Lengths

Array = NDArray[Any]

PLACE = 96
"""How many numbers, one for each letter, tell where a worker is."""


class Meeting:
    """Compares where workers are. A worker's line is its place, the steps made since the last exchange, and a sample of these.

    Args:
        grow: whether movements grow; None: if the optimizer divides by the size of the gradient.
    """

    def __init__(self, grow: bool | None) -> None:
        self.grow, self.lengths = grow, Lengths()
        self.exchanges = 0
        self.place = ""
        self.problem: Exception | None = None
        """What was raised, for TensorFlow reports an error of its own."""

    def here(self) -> Array:
        """Return where this worker is."""
        letters = f"{self.place}, {self.exchanges} exchanges made".ljust(PLACE).encode("ascii")
        return np.frombuffer(letters, np.uint8).astype(np.float64)

    def meet(self, exchanges: bool, lines: Array) -> np.float64:
        """Return s from all workers' lines, and note these if workers exchange. Raise on all if their places differ."""
        try:
            self._check(exchanges, lines)
        except Exception as error:
            self.problem = error
            raise
        growth = self.lengths.factor(len(lines))
        if exchanges:
            self.exchanges += 1
            if self.lengths.grow:
                self.lengths.note(lines[:, PLACE + 1 :].mean(0).tolist())
        return np.float64(growth)

    def _check(self, exchanges: bool, lines: Array) -> None:
        places = [line[:PLACE].astype(np.uint8).tobytes().decode("ascii").strip() for line in lines]
        if len(set(places)) > 1:
            raise RuntimeError(
                f"all workers must be in the same place with LocalUpdates, got {places}; call hvd.broadcast_variables("
                "model.weights, root_rank=0) before fit, let all train equally many batches and epochs (give steps_per_epoch, "
                "restore the same epoch on all, stop early on all or none), and catch no exception on one alone"
            )
        if exchanges and self.grow is None and not self.exchanges and lines[:, -1].any() and not lines[:, PLACE].any():
            raise ValueError(
                "grow must be given to LocalUpdates, got None: variables have moved, but the optimizer of compile() has made "
                "no step; give grow=True if the others divide by the size of the gradient, as Adam does, and else grow=False"
            )
