"""Horovod's collectives of a process set, started in the same order on all ranks. Tested by tests/parallel/local.py."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import torch
from horovod.common import process_sets
from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.core.step import Wait
from horovod_sparse.core.stock import complete_global_set
from horovod_sparse.exchange.protocols import Collective, Named
from horovod_sparse.torch.exchange import Collectives
from horovod_sparse.torch.group import Group

_under_way: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
"""The numbers of the collectives of a process set that are under way. Those of all its groups are numbered together."""


class HorovodGroup(Group):
    """The ranks of a process set of Horovod. Horovod matches by names: these number what is under way at the same time."""

    def __init__(self, process_set: Any) -> None:
        self.device = torch.device("cpu")
        complete_global_set(process_sets, mpi_ops)
        self._collectives = Collectives(process_set, "group")
        self._key = (process_set.process_set_id, *process_set.ranks)
        self.world, self.position, self.rank = process_set.size(), process_set.rank(), mpi_ops.rank()

    def start(self, collective: Collective, name: str = "", bucket: Named | None = None) -> Wait:
        under_way = _under_way[self._key]
        # The lowest one that is free, so that names come again and Horovod knows them.
        number = next(one for one in itertools.count() if one not in under_way)
        wait = self._collectives.start(collective, f"{collective.kind}.{number}", bucket)
        under_way.add(number)

        def result() -> Tensor:
            try:
                received: Tensor = wait()
            finally:
                under_way.discard(number)
            return received

        return result

    def _tell(self, line: bytes, room: int) -> list[bytes]:
        # In one collective, whatever its length: Horovod gathers messages of any lengths.
        message = torch.frombuffer(bytearray(line + b"\n"), dtype=torch.uint8)
        lines: Tensor = self.start(Collective("allgather", message))()
        return lines.numpy().tobytes().splitlines()
