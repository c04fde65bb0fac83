"""Horovod's collectives of a process set, started in the same order on all ranks: a `grouped.Transport`."""

from __future__ import annotations

from typing import Any

import torch
from horovod.common import process_sets
from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.core.pipeline import Wait
from horovod_sparse.core.process_sets import complete_global_set
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.torch.agreement import hosts
from horovod_sparse.torch.exchange import Collectives, gather_json


class HorovodGroup:
    """The ranks of a process set. All groups of a set give their collectives the same names, so they are used in turn.

    Args:
        process_set: of Horovod.
        device: where the tensors are that are exchanged.
    """

    def __init__(self, process_set: Any, device: torch.device) -> None:
        complete_global_set(process_sets, mpi_ops._basics)
        self.world: int = process_set.size()
        self.position: int = process_set.rank()
        self.rank: int = mpi_ops.rank()
        self._process_set = process_set
        self._name = f"horovod_sparse.{process_set.process_set_id}.group"
        self._device = device
        self._collectives = Collectives(mpi_ops.Sum, 1.0, process_set)
        self._under_way = 0
        self._number = 0

    def start(self, collective: Collective) -> Wait:
        if not self._under_way:
            # Horovod remembers names, so they begin anew whenever nothing is under way.
            self._number = 0
            self._collectives.end_step()
        self._under_way += 1
        name = f"{self._name}.{self._number}"
        self._number += 1
        wait = self._collectives.start(collective.kind, collective.message.contiguous(), name, collective.to)

        def result() -> Tensor:
            self._under_way -= 1
            return wait()

        return result

    def everyone(self, value: Any) -> list[Any]:
        return gather_json(value, f"{self._name}.everyone", self._process_set)

    def hosts(self) -> list[str]:
        return hosts(self._process_set)
