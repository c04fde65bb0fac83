"""How the ranks of a node share gradients: each has an equal part of every one. Plain arithmetic on shapes. No Horovod.

The gradients of a bucket become a row for each rank: its part of the first gradient, of the second, and so on. What no entry is
left for is never read.

Tested by tests/parallel/ddp/nodes.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def width(tensor: Tensor, ranks: int) -> int:
    """Return how many entries of a row a tensor takes."""
    return -(-tensor.numel() // ranks)


def part_like(tensor: Tensor, position: int, ranks: int) -> Tensor:
    """Return an array with the type, the device and the length of a rank's part of a tensor, without memory for entries."""
    each = width(tensor, ranks)
    return tensor.detach().new_zeros(1).expand(min(max(tensor.numel() - position * each, 0), each))


def filled(tensors: Sequence[Tensor], used: Sequence[bool] | None, ranks: int, dtype: torch.dtype) -> Tensor:
    """Return the rows of all ranks one after another, with the entries of tensors.

    Where it is told which of these are `used`, the entries of others are zeros, and every row ends with a 1 or a 0 for each.
    """
    values = sum(width(one, ranks) for one in tensors)
    rows = tensors[0].new_empty((ranks, values + len(used or ())), dtype=dtype)
    for number, parts in enumerate(_places(rows, tensors)):
        for row, entries in parts:
            if used is None or used[number]:
                row.copy_(entries)
            else:
                row.zero_()
    if used is not None:
        rows[:, values:] = torch.tensor(used, dtype=dtype)
    return rows.view(-1)


def spread(rows: Tensor, tensors: Sequence[Tensor], ranks: int) -> None:
    """Write the rows of all ranks, which are one after another, to tensors."""
    for parts in _places(rows.view(ranks, -1), tensors):
        for row, entries in parts:
            entries.copy_(row)


def _places(rows: Tensor, tensors: Sequence[Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield for each tensor where its entries belong in rows, and where they are in the tensor."""
    ranks, start = len(rows), 0
    for tensor in tensors:
        flat, each = tensor.view(-1), width(tensor, ranks)
        columns = rows[:, start : start + each]
        full = len(flat) // max(each, 1)
        found = [(columns[:full], flat[: full * each].view(full, each))]
        if full * each < len(flat):
            found.append((columns[full, : len(flat) - full * each], flat[full * each :]))
        yield found
        start += each
