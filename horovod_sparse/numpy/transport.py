"""The collectives of an mpi4py communicator. Does not import mpi4py: the communicator is passed in."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.core.agreement import check_steps
from horovod_sparse.core.pipeline import AnyBucket, Wait
from horovod_sparse.exchange.protocols import Collective

Array = NDArray[Any]

_GIVEN_UP, _EXCHANGED, _RETURNED = range(3)
"""How a worker's step has ended: within its collectives, after them, or by returning what was reduced."""


@dataclass(eq=False)
class _Started:
    """A collective that was started. MPI reads and writes the memory until it has completed, so this keeps the memory alive."""

    message: Array
    result: Array
    request: Any = None
    """None if an interrupt came while it was started."""


class Communicator:
    """An mpi4py communicator, as a `Transport`; None for a single worker. `start` is for the collectives of a step."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.world = 1 if comm is None else int(comm.Get_size())
        self.position = self.rank = 0 if comm is None else int(comm.Get_rank())
        self._under_way: list[_Started] = []
        """The collectives of this step, and those of aborted steps until MPI has completed them."""
        self._lane = comm
        """The communicator of steps. MPI matches by order, so after a step that was given up there must be another."""
        self._meeting: Wait | None = None
        """Waits for what the workers tell each other before a step."""
        self._ended = _RETURNED
        """How this worker's last step has ended."""

    def start(self, collective: Collective, name: str = "", bucket: AnyBucket | None = None) -> Wait:
        """See `Transport`. Waiting raises RuntimeError if another worker has given up the step."""
        return self._start(collective, self._lane)

    def everyone(self, value: Any) -> list[Any]:
        line = json.dumps(value).encode("ascii")
        lengths = self._start(Collective("allgather", np.array([len(line)])), self._comm)()
        padded = np.frombuffer(line.ljust(lengths.max()), np.uint8)
        lines = self._start(Collective("allgather", padded), self._comm)().reshape(self.world, -1)
        return [json.loads(one.tobytes()) for one in lines]

    def meet(self, step: int, *, alike: bool) -> None:
        """Find out where the other workers are before a step begins. Blocks.

        Raises:
            RuntimeError: on every worker, if the last step has ended on some workers alone, or if the numbers of their steps
                must be `alike` and are not.
        """
        # Release the memory of the collectives of aborted steps that MPI has completed.
        self._under_way = [one for one in self._under_way if one.request is None or not one.request.Test()]
        if self._meeting is None:
            # After an interrupt the others know these numbers already.
            self._meeting = self._start(Collective("allgather", np.array([self._ended, step])), self._comm)
        ended, steps = self._meeting().reshape(self.world, -1).T.tolist()
        # In one statement: either the others are still to be met, or this worker takes part in their step.
        self._meeting, self._ended = None, _GIVEN_UP
        raised = [rank for rank, how in enumerate(ended) if how != _RETURNED]
        # This is told once: afterwards the step has been given up on all workers.
        if 0 < len(raised) < self.world:
            raise RuntimeError(
                f"rank {self.rank}: the last call must have returned on all workers, but has raised on {raised} alone, and "
                "parameters may differ. Load a checkpoint on all workers"
            )
        if alike:
            check_steps(steps, self.rank)
        if _GIVEN_UP in ended:
            self.renew()

    def renew(self) -> None:
        """Take a new communicator for the steps that follow. All workers call this together."""
        self._lane = self._comm and self._comm.Dup()

    def exchanged(self) -> None:
        """Note that all collectives of this step have ended."""
        self._ended = _EXCHANGED

    def end_step(self) -> None:
        """Note that the step has ended, and its result is returned."""
        self._under_way.clear()
        self._ended = _RETURNED

    def give_up(self) -> None:
        """Tell the other workers that this one has given up a step whose collectives they may wait for. Does not wait."""
        for other in range(self.world):
            if other != self.rank and self._ended == _GIVEN_UP:
                told = _Started(np.zeros(1, np.uint8), np.zeros(0))
                self._under_way.append(told)
                told.request = self._lane.Isend(told.message, other)

    def _start(self, collective: Collective, comm: Any) -> Wait:
        message = np.ascontiguousarray(collective.message)
        if comm is None:
            return lambda: message
        rows = len(message) * (self.world if collective.kind == "allgather" else 1)
        started = _Started(message, np.empty((rows, *message.shape[1:]), message.dtype))
        # First, because MPI may write to this memory as soon as the collective has begun.
        self._under_way.append(started)
        begin = comm.Iallgather if collective.kind == "allgather" else comm.Iallreduce
        started.request = begin(message, started.result)

        def wait() -> Array:
            while not started.request.Test():
                # On the caller's communicator there may be messages of others.
                if comm is not self._comm and comm.Iprobe():
                    raise RuntimeError(
                        f"rank {self.rank}: another worker has raised within this step, and given it up; see its error"
                    )
                # As MPI does where there are more workers than processors.
                time.sleep(0)
            return started.result

        return wait
