"""Horovod's collectives of zeros, to measure the network with. They are named, and within one process set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from horovod.torch import mpi_ops

from horovod_sparse.exchange.measure import Run
from horovod_sparse.exchange.network import Call
from horovod_sparse.torch.exchange import gather_json


class TimedCollectives:
    """Implements `exchange.measure.Collectives`.

    Args:
        process_set: of Horovod; the workers whose network is measured.
        prefix: of the collectives' names, which nobody else uses at the same time.
        device: where the arrays are.
    """

    def __init__(self, process_set: Any, prefix: str, device: torch.device | str = "cpu") -> None:
        self._process_set = process_set
        self._prefix = prefix
        self._device = device
        self.world: int = process_set.size()

    def run(self, calls: Sequence[Call], name: str) -> Run:
        begin = [self._starter(call, f"{self._prefix}.{name}.{number}") for number, call in enumerate(calls)]

        def run() -> None:
            for handle in [start() for start in begin]:
                mpi_ops.synchronize(handle)

        return run

    def _starter(self, call: Call, name: str) -> Callable[[], Any]:
        reduces = call.kind == "allreduce"
        dtype = torch.float16 if call.itemsize == 2 else torch.float32 if reduces else torch.int32
        message = torch.zeros(call.length, dtype=dtype, device=self._device)
        where = {"name": name, "process_set": self._process_set}
        if reduces:
            return partial(mpi_ops.allreduce_async_, message, op=mpi_ops.Sum, **where)
        return partial(getattr(mpi_ops, f"{call.kind}_async"), message, **where)

    def everyone(self, value: Any) -> list[Any]:
        return gather_json(value, f"{self._prefix}.everyone", self._process_set)
