"""Horovod's collectives of a process set, started in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch
from horovod.common import process_sets
from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.core.pipeline import AnyBucket, Wait
from horovod_sparse.core.stock import complete_global_set
from horovod_sparse.exchange.protocols import Collective, Kind
from horovod_sparse.torch.exchange import Collectives
from horovod_sparse.torch.group import Group

_collectives: dict[tuple[int, ...], Collectives] = {}
"""By process set. Those of all groups of a set have the same names, so that the next of them notices what one has given up."""


class HorovodGroup(Group):
    """The ranks of a process set of Horovod, which start collectives within `together`.

    Collectives are numbered in each such block, and their results are waited for in this order. So a rank that raises can tell
    the others, which may be further on: they wait for the first number that it has not started.
    """

    recovers = True

    def __init__(self, process_set: Any) -> None:
        complete_global_set(process_sets, mpi_ops._basics)
        self._collectives = _collectives.setdefault(
            (process_set.process_set_id, *process_set.ranks), Collectives(process_set, "group")
        )
        self.world, self.position, self.rank = process_set.size(), process_set.rank(), mpi_ops.rank()
        self._waits: list[Wait] = []
        self._results: list[Tensor] = []

    def start(self, collective: Collective, name: str = "", bucket: AnyBucket | None = None) -> Wait:
        number = len(self._waits)
        self._waits.append(self._collectives.start(collective, f"{collective.kind}.{number}"))

        def result() -> Tensor:
            while len(self._results) <= number:
                self._results.append(self._waits[len(self._results)]())
            return self._results[number]

        return result

    def _ask(self, line: bytes, room: int) -> Callable[[], list[bytes]]:
        # In one collective, whatever its length: some workers wait for it before they start others, and some do not.
        wait = self.start(Collective("allgather", torch.frombuffer(bytearray(line + b"\n"), dtype=torch.uint8)))
        return lambda: wait().numpy().tobytes().splitlines()

    @contextmanager
    def together(self, *, goes_on: bool = False) -> Iterator[None]:
        """A block that all ranks enter. Call `give_up` if it raises. If it `goes_on`, the next block belongs to it.

        Raises:
            RuntimeError: on every rank, if some have left a block by an exception and others have not, or if the block of
                another group of the process set goes on, whose collectives have the same names.
        """
        collectives = self._collectives
        if collectives.group not in (None, self):
            raise RuntimeError(
                "LocalUpdates must have a process set of its own beside another one with overlap, got one where an exchange of "
                "the other travels; pass group=hvd.add_process_set(...), or call synchronize() of the other one first"
            )
        collectives.clear_up()
        collectives.group = self
        yield
        if not goes_on:
            collectives.end_step()
            self._end()

    def give_up(self) -> None:
        if self._collectives.group is self:
            self._collectives.give_up({f"{kind}.{len(self._waits)}": kind for kind in get_args(Kind)})
            self._end()

    def _end(self) -> None:
        self._waits, self._results = [], []
        self._collectives.group = None
