"""The kernel that selects the largest entries of each chunk, one program a chunk. Imports torch and Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from horovod_sparse.kernels.gpu.floats import bits_of
from horovod_sparse.ops.protocol import Selection

MOST_LENGTH = 2**14
"""A program keeps its chunk in registers, which hold no more."""


@triton.jit(do_not_specialize=["numel", "count"])
def select(x, numel: tl.int64, count: tl.int64, indices, LENGTH: tl.constexpr):
    """Write the indices that one chunk selects to its rows. Rows for which too few entries are not zero stay as they are."""
    first = tl.program_id(0).to(tl.int64) * LENGTH
    index = first + tl.arange(0, LENGTH)
    row = first * count // numel
    wanted = tl.minimum(first + LENGTH, numel) * count // numel - row
    bits = bits_of(tl.load(x + index, index < numel, other=0.0))
    # Bit by bit, the largest number that as many as are wanted are not below.
    smallest = tl.full((), 0, tl.int32)
    for place in range(0, 31):
        larger = smallest | (1 << (30 - place))
        enough = tl.sum((bits >= larger).to(tl.int32), 0) >= wanted
        smallest = tl.where(enough, larger, smallest)
    above, equal = bits > smallest, (bits == smallest) & (bits > 0)
    left = wanted - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))
    tl.store(indices + row + tl.cumsum(chosen.to(tl.int32), 0) - 1, index, chosen)


def select_in_chunks(x: Tensor, length: int, count: int) -> Selection:
    """Do as `Ops.select_in_chunks` for float32 and a length that is a power of two, at most `MOST_LENGTH`."""
    indices = torch.full((count,), -1, dtype=torch.int64, device=x.device)
    # Triton launches on the current device.
    with torch.cuda.device_of(x):
        select[(-(-len(x) // length),)](x, len(x), count, indices, LENGTH=length, num_warps=8)
    indices = indices[indices >= 0]
    return Selection(indices, len(indices))
