"""Horovod's collectives as the reducer needs them: named, asynchronous, within one process set."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch import Tensor


def gather_async(message: Tensor, name: str, process_set: Any) -> Callable[[], Tensor]:
    """Start an allgather; the returned function waits for it and gives all ranks' messages, in rank order."""
    handle = mpi_ops.allgather_async(message, name=name, process_set=process_set)
    return lambda: mpi_ops.synchronize(handle)


def sum_async(message: Tensor, name: str, process_set: Any) -> Callable[[], Tensor]:
    """Start an allreduce in place; the returned function waits for it and gives the sum of all ranks' messages."""
    handle = mpi_ops.allreduce_async_(message, name=name, op=mpi_ops.Sum, process_set=process_set)
    return lambda: mpi_ops.synchronize(handle)


def allreduce_async(tensor: Tensor, name: str, op: Any, predivide: float, process_set: Any) -> Callable[[], Tensor]:
    """Start Horovod's dense allreduce in place; `predivide` splits the averaging as `gradient_predivide_factor` does."""
    handle = mpi_ops.allreduce_async_(
        tensor, name=name, op=op, prescale_factor=1.0 / predivide, postscale_factor=predivide, process_set=process_set
    )
    return lambda: mpi_ops.synchronize(handle)


def gather_json(value: object, name: str, process_set: Any) -> list[Any]:
    """Every rank's `value`, in rank order; blocks. Plain JSON, because what comes from other machines is not unpickled."""
    line = bytearray(json.dumps(value).encode("ascii") + b"\n")
    gathered = mpi_ops.allgather(torch.frombuffer(line, dtype=torch.uint8), name=name, process_set=process_set)
    return [json.loads(part) for part in gathered.numpy().tobytes().splitlines()]
