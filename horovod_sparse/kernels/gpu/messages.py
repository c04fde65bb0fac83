"""What is done to messages of pairs on a GPU, without waiting for the device. Imports torch and Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from horovod_sparse.kernels.gpu.message import scatter

CHUNK = 1024


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
    # Triton launches on the current device.
    with torch.cuda.device_of(target):
        for message in messages.split(rows):
            scatter[(-(-rows // CHUNK),)](message, rows, divisor, target, numel, CHUNK=CHUNK)
    return target
