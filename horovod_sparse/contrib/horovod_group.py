"""Horovod's collectives of a process set, started in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from horovod.common import process_sets
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.core.pipeline import Wait
from horovod_sparse.core.stock import complete_global_set
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.torch.exchange import Collectives, as_line, from_lines
from horovod_sparse.torch.group import Group

_GIVEN_UP = None
"""What a rank tells the others, in place of any value, if it has left an exchange by an exception."""


class HorovodGroup(Group):
    """The ranks of a process set of Horovod, which start collectives within `together`.

    All groups of a set give collectives the same names, so they are used in turn.
    """

    def __init__(self, process_set: Any) -> None:
        complete_global_set(process_sets, mpi_ops._basics)
        self.world: int = process_set.size()
        self.position: int = process_set.rank()
        self.rank: int = mpi_ops.rank()
        self._process_set = process_set
        self._begin()

    def _begin(self) -> None:
        """Let names begin anew, on all ranks: Horovod remembers them."""
        self._collectives = Collectives(mpi_ops.Sum, self._process_set)
        self._collectives.prefix += "group."
        self._number = self._meetings = 0

    def start(self, collective: Collective) -> Wait:
        # Whether all ranks have started this is not known.
        self._met = False
        name, self._number = str(self._number), self._number + 1
        wait = self._collectives.start(collective.kind, collective.message.contiguous(), name, collective.to)

        def result() -> Tensor:
            if not self._met:
                self.everyone("here")
                self._met = True
            return wait()

        return result

    def everyone(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order. Blocks. Raise RuntimeError if a rank has raised."""
        everyone = from_lines(self._tell(value)())
        if _GIVEN_UP in everyone:
            raise RuntimeError(
                f"rank {self.rank}: worker {everyone.index(_GIVEN_UP)} of its group has given up this exchange after an "
                "exception, so all workers do; nothing has changed, and all of them may go on"
            )
        return everyone

    def _tell(self, value: Any) -> Wait:
        name, self._meetings = f"meeting.{self._meetings}", self._meetings + 1
        return self._collectives.start("allgather", as_line(value), name)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that all ranks enter. If it raises on one of them, it raises on all.

        Before a rank waits for what others start, and at the end, all of them meet. So one that has raised need only
        come to the next meeting, and then takes part in what others have started already.
        """
        self._begin()
        try:
            yield
            self.everyone("here")
        except BaseException:
            # If Horovod is down, the others know.
            with suppress(HorovodInternalError):
                self._tell(_GIVEN_UP)
                self._collectives.given_up = True
                self._collectives.clear_up()
            raise
