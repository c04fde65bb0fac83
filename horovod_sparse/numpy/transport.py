"""The collectives of an mpi4py communicator. Does not import mpi4py: the communicator is passed in.

Tested by tests/parallel/policies.py.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.core.step import Wait
from horovod_sparse.exchange.protocols import Collective, Named

Array = NDArray[Any]


class Communicator:
    """An mpi4py communicator, as a `Transport`; None for a single worker. MPI matches collectives by their order."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.world = 1 if comm is None else int(comm.Get_size())
        self.position = self.rank = 0 if comm is None else int(comm.Get_rank())

    def start(self, collective: Collective, name: str = "", bucket: Named | None = None) -> Wait:
        message = np.ascontiguousarray(collective.message)
        if self._comm is None:
            return lambda: message
        rows = len(message) * (self.world if collective.kind == "allgather" else 1)
        result = np.empty((rows, *message.shape[1:]), message.dtype)
        begin = self._comm.Iallgather if collective.kind == "allgather" else self._comm.Iallreduce
        # MPI reads and writes this memory until it has completed. The function below keeps it alive.
        request = begin(message, result)

        def wait() -> Array:
            while not request.Test():
                # As MPI does where there are more workers than processors.
                time.sleep(0)
            return result if len(message) else message

        return wait

    def everyone(self, value: Any) -> list[Any]:
        line = json.dumps(value).encode("ascii")
        lengths = self.start(Collective("allgather", np.array([len(line)])))()
        padded = np.frombuffer(line.ljust(lengths.max()), np.uint8)
        lines = self.start(Collective("allgather", padded))().reshape(self.world, -1)
        return [json.loads(one.tobytes()) for one in lines]
