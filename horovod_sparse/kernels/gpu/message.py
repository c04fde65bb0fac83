"""The kernels that write a message of pairs, and add up what has arrived. Imports torch and Triton.

Tested by tests/kernels/gpu/test_kernels.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from horovod_sparse.exchange import wire
from horovod_sparse.kernels.gpu.floats import bits_of, value_of
from horovod_sparse.kernels.gpu.search import LIMIT, MOST_EQUAL, chunk_of, counts_of, must_read_all, steps_of
from horovod_sparse.kernels.gpu.tiles import LIMIT_VALUE, NOT_FINITE, SENT

CHUNK = 1024
_WIRE_NOT_FINITE = tl.constexpr(wire.NOT_FINITE)
_WIRE_PADDING = tl.constexpr(wire.PADDING)


@triton.jit
def _store_rows(message, row, index, value, used):
    tl.store(message + row * 2, index, used)
    tl.store(message + row * 2 + 1, value.to(tl.int32, bitcast=True), used)


@triton.jit(do_not_specialize=["tiles", "groups", "capacity"])
def write(
    residual,
    starts,
    found,
    slots,
    tiles: tl.int64,
    group_above,
    group_equal,
    groups: tl.int64,
    capacity: tl.int64,
    message,
    numbers,
    words,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write the message of pairs, and set to zero what is in the message."""
    group = tl.program_id(0)
    limit = tl.load(words + LIMIT)
    most_equal = tl.load(words + MOST_EQUAL)
    all_above, above = counts_of(group_above, group, groups, GROUPS)
    all_equal, equal = counts_of(group_equal, group, groups, GROUPS)
    sent = tl.minimum(all_above + tl.minimum(all_equal, most_equal), capacity)

    first, steps, sparse = steps_of(group, tiles, must_read_all(words), found, BLOCK, SLOTS, TILES, CHUNK)
    for step in range(0, steps):
        indices, valid, x = chunk_of(
            step, sparse, first, residual, tiles, starts, found, slots, BLOCK, SLOTS, TILES, CHUNK
        )
        is_above, is_equal = valid & (bits_of(x) > limit), valid & (bits_of(x) == limit)
        # One number holds two counts.
        both = is_above.to(tl.int32) + is_equal.to(tl.int32) * 65536
        before = tl.cumsum(both, 0) - both
        equal_before = equal + (before >> 16)
        row = above + (before & 65535) + tl.minimum(equal_before, most_equal)
        chosen = (is_above | (is_equal & (equal_before < most_equal))) & (row < capacity)
        _store_rows(message, row, indices.to(tl.int32), x, chosen)
        tl.store(residual + indices, tl.zeros_like(x), chosen)
        these = tl.sum(both, 0)
        above += these & 65535
        equal += these >> 16

    # This program's share of the rows is padded where nothing is sent in them.
    bad = tl.load(numbers + NOT_FINITE).to(tl.int32) > 0
    rows = (capacity + groups - 1) // groups
    for start in range(0, rows, CHUNK):
        number = start + tl.arange(0, CHUNK)
        row = group * rows + number
        unused = (number < rows) & (row >= sent) & (row < capacity)
        index = tl.where(bad & (row == 0), _WIRE_NOT_FINITE, _WIRE_PADDING)
        _store_rows(message, row, index, tl.zeros([CHUNK], tl.int32), unused)
    if group == 0:
        tl.store(numbers + SENT, sent.to(tl.float64))
        tl.store(numbers + LIMIT_VALUE, value_of(limit))


@triton.jit(do_not_specialize=["rows", "numel"])
def scatter(message, rows: tl.int64, divisor: tl.float64, target, numel: tl.int64, CHUNK: tl.constexpr):
    """Add the entries of one rank's message that are within a dense target to it, divided by `divisor`."""
    row = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = row < rows
    index = tl.load(message + row * 2, inside, other=_WIRE_PADDING)
    value = tl.load(message + row * 2 + 1, inside, other=0).to(tl.float32, bitcast=True)
    value = tl.div_rn(value, tl.zeros_like(value) + tl.full((), divisor, tl.float64).to(tl.float32))
    used = (index >= 0) & (index < numel)
    before = tl.load(target + index, used, other=0.0)
    tl.store(target + index, before + value.to(before.dtype), used)


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
