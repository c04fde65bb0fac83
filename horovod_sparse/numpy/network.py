"""MPI's collectives of NumPy arrays as the network is measured with them, and the sum of float16. Does not import mpi4py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from horovod_sparse.core.pipeline import Wait
from horovod_sparse.exchange.measure import Run
from horovod_sparse.exchange.network import Call
from horovod_sparse.exchange.protocols import Collective

Start = Callable[[Collective], Wait]
"""Starts a collective, and returns what waits for its result."""


class TimedCollectives:
    """Implements `exchange.measure.Collectives`. `start` starts collectives of `world` workers."""

    def __init__(self, start: Start, world: int) -> None:
        self._start = start
        self.world = world

    def run(self, calls: Sequence[Call], name: str) -> Run:
        started = [Collective(call.kind, np.zeros(call.length, np.float32)) for call in calls]

        def run() -> None:
            for wait in [self._start(one) for one in started]:
                wait()

        return run

    def everyone(self, value: Any) -> list[Any]:
        line = json.dumps(value).encode("ascii")
        longest = max(self._start(Collective("allgather", np.array([len(line)])))().tolist())
        lines = self._start(Collective("allgather", np.frombuffer(line.ljust(longest), np.uint8)))()
        return [json.loads(one.tobytes()) for one in lines.reshape(self.world, -1)]


def half_sum(comm: Any) -> Any:
    """Return MPI's operation that adds float16, given as the uint16 with the same bits, for an mpi4py communicator."""
    return _half_sum(sys.modules[type(comm).__module__])


@cache
def _half_sum(mpi: Any) -> Any:
    # MPI has no type for float16. mpi4py has room for a few such operations in a process, so there is one.
    return mpi.Op.Create(_add_halves, commute=True)


def _add_halves(given: Any, total: Any, datatype: Any) -> None:
    sums = np.frombuffer(total, np.float16)
    sums += np.frombuffer(given, np.float16)
