"""What the ranks of a node do together in a step: they add up DDP's buckets, and gather what has come of these. No Horovod.

Tested by tests/parallel/ddp/nodes.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, compress
from typing import NamedTuple

import torch
from torch import Tensor

from horovod_sparse.core.step import Wait
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.torch.ddp import Used
from horovod_sparse.torch.group import Group
from horovod_sparse.torch.parameters import wide
from horovod_sparse.torch.rows import filled, part_like, spread, width


class Bucket(NamedTuple):
    """A bucket of DDP in one step."""

    buffer: Tensor
    future: torch.futures.Future[Tensor]
    """Tells DDP that it is reduced."""
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    """Views of the buffer."""


class Within:
    """The collectives of a node in one step after the other. All its ranks start these in the order of DDP's buckets.

    Args:
        node: its ranks.
        own: what this rank has used in a step; None if it is everything, and nobody tells.
    """

    def __init__(self, node: Group, own: Used | None) -> None:
        self.node, self._own = node, own
        self.used: set[Tensor] = set()
        """The parameters that some rank of the node has used, if the ranks tell."""
        self._under_way: deque[tuple[Bucket, Wait]] = deque()
        """The buckets that are added up now."""
        self._reduced: list[tuple[Bucket, Tensor]] = []
        """This rank's part of the others."""

    def __len__(self) -> int:
        """Return how many buckets are added up now."""
        return len(self._under_way)

    def scatter(self, bucket: Bucket) -> Tensor:
        """Begin to add up a bucket, each rank its part. Return an array like the one that this rank gives, without memory."""
        flags = None if self._own is None else [one in self._own.now for one in bucket.parameters]
        # Sums of a half-precision type are rounded once, at the end.
        rows = filled(bucket.gradients, flags, self.node.world, wide(bucket.buffer))
        self._under_way.append((bucket, self.node.scatter(rows)))
        return part_like(rows, 0, 1)

    def take(self) -> Mapping[Tensor, Tensor]:
        """Wait until a bucket is added up. Return this rank's part of the mean of each gradient, by parameter."""
        bucket, wait = self._under_way.popleft()
        node, sums = self.node, wait().div_(self.node.world)
        *starts, values = accumulate((width(one, node.world) for one in bucket.gradients), initial=0)
        self.used.update(compress(bucket.parameters, sums[values:].tolist()))
        self._reduced.append((bucket, sums[:values]))
        lengths = [len(part_like(one, node.position, node.world)) for one in bucket.gradients]
        places = zip(bucket.parameters, starts, lengths, strict=True)
        return {parameter: sums[start : start + length] for parameter, start, length in places}

    def gather(self) -> None:
        """Let each rank have what the others have of all gradients, in DDP's memory."""
        started = [
            (one, self.node.start(Collective("allgather", sums.to(one.buffer.dtype)))) for one, sums in self._reduced
        ]
        for one, wait in started:
            spread(wait(), one.gradients, self.node.world)

    def give_up(self, left: Sequence[Tensor]) -> None:
        """Take part in what the others add up, which this rank has no use for: arrays like these are left to be given."""
        waits = [wait for _, wait in self._under_way]
        waits += [self.node.scatter(one.new_zeros(len(one))) for one in left]
        for wait in waits:
            wait()

    def forget(self) -> None:
        """Forget the step."""
        self._reduced = []
        self._under_way.clear()
        self.used.clear()
