"""What a rank has done in a step so far, and the gradients that it takes together. Never imports Horovod."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from horovod_sparse.core.intake import Arrived
from horovod_sparse.core.pipeline import AnyBucket, Wait
from horovod_sparse.torch.unchanged import Handed

_TOGETHER = 2**18
"""Bytes of gradients that are taken together; a processor's cache holds as many."""


@dataclass
class Step:
    """What this rank has done in a step so far."""

    handed: dict[Tensor, Handed] = field(default_factory=dict)
    """The gradients that backward has handed over, by parameter."""
    begun: bool = False
    """True once gradients are being taken: they are in residuals, or on their way."""
    taken: set[str] = field(default_factory=set)
    """The names of the parameters that have been taken, with a gradient or without one."""
    exchanges: dict[str, Wait] = field(default_factory=dict)
    """The functions that wait for the first collective, by bucket."""
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    """The gradients of a `GroupReducer`, whose memory gets the reduced ones."""
    promised: list[tuple[Tensor, torch.futures.Future[Tensor]]] = field(default_factory=list)
    """DDP's buckets, and what tells DDP that each is reduced."""
    sparse: dict[Tensor, Wait] = field(default_factory=dict)
    _waiting: defaultdict[str, list[Arrived]] = field(default_factory=lambda: defaultdict(list))
    """The gradients that wait to be taken together, by bucket, and how many bytes they have."""
    _nbytes: Counter[str] = field(default_factory=Counter)
    learning_rates: dict[Tensor, float] = field(default_factory=dict)
    """Those of the parameters, for `lr_in_residual`."""

    def collect(self, bucket: AnyBucket, arrived: Arrived) -> list[Arrived]:
        """Return a bucket's gradients to take now: large ones at once, while they are in the caches, small ones together."""
        name, waiting = bucket.name, self._waiting[bucket.name]
        waiting.append(arrived)
        if arrived.gradient is not None:
            self._nbytes[name] += arrived.gradient.nbytes
        if self._nbytes[name] < _TOGETHER and len(waiting) < len(bucket.missing):
            return []
        self._nbytes[name] = 0
        return self._waiting.pop(name)
