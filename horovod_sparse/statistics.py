"""What was asked for, what was sent: the numbers behind `compression.stats()`.

A step only adds a few Python numbers that are known anyway; everything else is worked out when somebody asks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from horovod_sparse.cost import allgather_bytes


@dataclass(frozen=True)
class BucketStats:
    """One bucket, or all together; counts are per step and worker."""

    name: str
    numel: float
    """Entries that are selected from."""
    asked: float
    """k."""
    count: float
    """Entries sent."""
    threshold: float
    """Magnitude above which entries were sent; NaN where there is none."""
    stages: float
    """Fitting stages; 0 where there are none."""
    overflow: float
    """Entries that qualified but found no room in the message; they stayed in the residual."""
    bytes_sent: float
    """Put on the network by this worker, in a ring; padding included."""
    bytes_received: float
    residual_norm: float
    """Euclidean norm of the residual at the time of asking; NaN in averages."""

    @property
    def ratio(self) -> float:
        """Entries sent / entries selected from."""
        return self.count / self.numel if self.numel else math.nan


@dataclass(frozen=True)
class StepStats:
    """All buckets of one step, or their average over steps."""

    buckets: tuple[BucketStats, ...]
    dense_bytes_sent: float
    """Of the parameters below `min_numel`; embeddings with sparse gradients are not counted."""

    @property
    def total(self) -> BucketStats:
        """The sums over the buckets (thresholds and stages: their mean)."""

        def total(field: str) -> float:
            return math.fsum(getattr(bucket, field) for bucket in self.buckets)

        summed = ("numel", "asked", "count", "overflow", "bytes_sent", "bytes_received")
        number = max(len(self.buckets), 1)
        return BucketStats(
            name="total",
            threshold=total("threshold") / number,
            stages=total("stages") / number,
            residual_norm=math.sqrt(math.fsum(bucket.residual_norm**2 for bucket in self.buckets)),
            **{field: total(field) for field in summed},
        )


@dataclass(frozen=True)
class Stats:
    """What `compression.stats()` returns."""

    steps: int
    last: StepStats
    mean: StepStats


@dataclass
class Tally:
    """Running sums of one bucket."""

    steps: int = 0
    last: tuple[int, int, int, float, int, int] = (0, 0, 0, math.nan, 0, 0)
    """asked, count, overflow, threshold, stages, bytes: one way."""
    sums: tuple[float, ...] = (0.0,) * 6

    def add(self, asked: int, count: int, found: int, threshold: float, stages: int, capacity: int, world: int) -> None:
        """Take in one step."""
        self.steps += 1
        self.last = (asked, count, max(found - count, 0), threshold, stages, allgather_bytes(capacity, world))
        self.sums = tuple(total + value for total, value in zip(self.sums, self.last, strict=True))

    def stats(self, name: str, numel: int, residual_norm: float) -> tuple[BucketStats, BucketStats]:
        """The last step and the mean over all steps."""
        mean = tuple(total / max(self.steps, 1) for total in self.sums)
        return self._stats(name, numel, self.last, residual_norm), self._stats(name, numel, mean, math.nan)

    @staticmethod
    def _stats(name: str, numel: int, values: tuple[float, ...], residual_norm: float) -> BucketStats:
        asked, count, overflow, threshold, stages, sent = values
        return BucketStats(
            name, float(numel), asked, count, threshold, stages, overflow, sent, sent, residual_norm=residual_norm
        )
