"""What is done to messages of pairs on a GPU, without waiting for the device. Imports torch and Triton."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from horovod_sparse.exchange.wire import runs_of
from horovod_sparse.kernels.gpu.compact import write_compact, write_pairs
from horovod_sparse.kernels.gpu.message import scatter
from horovod_sparse.ops.protocol import Half

CHUNK = 1024


def device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Make the tensor's device the current one: Triton launches on the current device."""
    device: AbstractContextManager[None] = torch.cuda.device_of(tensor)
    return device


def compact(x: Tensor, message: Tensor, values: Half) -> Tensor:
    """Do what `Ops.compact` says."""
    capacity, runs = len(message), runs_of(x.numel())
    made = message.new_zeros(runs + capacity)
    with device_of(x):
        write_compact[(_chunks(capacity),)](x, message, capacity, runs, made, HALF=values, CHUNK=CHUNK)
    return made


def expand(gathered: Tensor, world: int, numel: int, values: Half) -> Tensor:
    """Do what `Ops.expand` says."""
    messages, runs = gathered.view(world, -1), runs_of(numel)
    capacity = messages.shape[1] - runs
    if capacity < 1:
        raise ValueError(
            f"gathered must be {world} messages of more than {runs} numbers each, got {gathered.numel()} numbers"
        )
    counts = messages[:, :runs]
    ends = counts.cumsum(1)
    bad = (counts < 0).any(1) | (ends[:, -1] > capacity)
    pairs = gathered.new_empty((world * capacity, 2))
    with device_of(gathered):
        write_pairs[(_chunks(capacity), world)](
            gathered, ends, bad.int(), capacity, runs, pairs, ROUNDS=runs.bit_length(), HALF=values, CHUNK=CHUNK
        )
    return pairs


def add_up(messages: Tensor, world: int, divisor: float, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the sum of all ranks' messages of pairs, rank by rank, as a flat tensor. The host does not wait for the device.

    Args:
        messages: the messages one after the other. Indices that are negative, or not below `numel`, are left out.
        world: the number of messages.
        divisor: what values are divided by, as float32.
        numel: the number of entries of the result.
        dtype: float32 or float64, the type of the result.
    """
    rows, over = divmod(len(messages), world)
    if over:
        # A message that ends early would be read beyond its end.
        raise ValueError(f"messages must have {world} equal parts, got {len(messages)} rows")
    target = torch.zeros(numel, dtype=dtype, device=messages.device)
    with device_of(target):
        for message in messages.split(rows):
            scatter[(_chunks(rows),)](message, rows, divisor, target, numel, CHUNK=CHUNK)
    return target


def _chunks(rows: int) -> int:
    return -(-rows // CHUNK)
