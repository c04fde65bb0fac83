"""Horovod's collectives of one process set, matched by their names. Tested by tests/parallel/exchange.py."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.core.step import Wait
from horovod_sparse.exchange.protocols import Collective, Named
from horovod_sparse.exchange.received import disagreement


class Collectives:
    """The collectives of one optimizer, or of the local updates of a process set, as a `Transport`."""

    def __init__(self, process_set: Any, number: int | str | None = None) -> None:
        self._process_set = process_set
        self._prefix = f"horovod_sparse.{process_set.process_set_id}."
        """Begins the names of the collectives, as Horovod knows them."""
        self.number = number
        """Comes next: the optimizer's number, the same on all ranks, or "local". None before the first agreement."""

    @property
    def world(self) -> int:
        return int(self._process_set.size())

    @property
    def position(self) -> int:
        return int(self._process_set.rank())

    @property
    def rank(self) -> int:
        return int(mpi_ops.rank())

    def start(self, collective: Collective, name: str = "", bucket: Named | None = None) -> Wait:
        message, where = collective.message, {"name": self._full(name), "process_set": self._process_set}
        if collective.kind == "allgather":
            handle = mpi_ops.allgather_async(message, **where)
        else:
            handle = mpi_ops.allreduce_async_(message, op=mpi_ops.Sum, **where)

        def wait() -> Tensor:
            try:
                result: Tensor = mpi_ops.synchronize(handle)
            except HorovodInternalError as error:
                if bucket is not None and "Mismatched" in str(error):
                    raise disagreement(bucket) from error
                raise
            return result

        return wait

    def start_sparse(self, gradient: Tensor, name: str, op: Any) -> Wait:
        """Start Horovod's own reduction of a sparse gradient."""
        wait: Wait = mpi_ops.sparse_allreduce_async(gradient, self._full(name), op, self._process_set)
        return wait

    def everyone(self, value: Any, name: str = "agree.state") -> list[Any]:
        """See `Transport`. All optimizers of the process set have the same name: at first they have no numbers."""
        return gather_json(value, f"{self._prefix}{name}", self._process_set)

    def _full(self, name: str) -> str:
        return f"{self._prefix}{self.number}.{name}"


def empty_sparse(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an empty sparse gradient for an embedding of this shape, with the type and on the device of `like`."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=like.device)
    return torch.sparse_coo_tensor(indices, like.new_empty((0, *shape[1:])), tuple(shape), check_invariants=False)


def spoiled_sparse(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a sparse gradient whose only entries are NaN, with the type and on the device of `like`."""
    indices, values = (
        torch.zeros((1, 1), dtype=torch.int64, device=like.device),
        like.new_full((1, *shape[1:]), math.nan),
    )
    return torch.sparse_coo_tensor(indices, values, tuple(shape), check_invariants=False)


def gather_json(value: object, name: str, process_set: Any) -> list[Any]:
    """Return every rank's `value`, in rank order. Blocks. Uses JSON, because data from other machines is not unpickled."""
    line = torch.frombuffer(bytearray(json.dumps(value).encode("ascii") + b"\n"), dtype=torch.uint8)
    lines = mpi_ops.allgather(line, name=name, process_set=process_set)
    return [json.loads(one) for one in lines.numpy().tobytes().splitlines()]
