"""The numbers behind `compression.stats()`. Most are computed when somebody asks, not in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class BucketStats:
    """Statistics of one bucket, or of all buckets together. Counts are per step and worker."""

    name: str
    numel: float
    """Number of entries to select from."""
    target: float
    """k, the number of entries to select."""
    count: float
    """Entries whose values this worker sent. If indices are gathered first, these are all that any worker selected."""
    threshold: float
    """Magnitude above which entries were sent; NaN if there is no threshold."""
    stages: float
    """Number of fitting stages; 0 if there are none."""
    truncated: float
    """Entries that qualified but found no room in the message; they stayed in the residual."""
    bytes_sent: float
    """Bytes that this worker put on the network, in a ring; padding included."""
    residual_norm: float
    """Euclidean norm of the residual at the time of asking, in averages too."""
    exchange: str
    """How the bucket was exchanged in the last step; "several" if buckets differ, in the total."""

    @property
    def ratio(self) -> float:
        """Entries sent / entries selected from."""
        return self.count / self.numel if self.numel else math.nan


@dataclass(frozen=True)
class StepStats:
    """All buckets of one step, or their average over steps."""

    buckets: tuple[BucketStats, ...]
    dense_bytes_sent: float
    """Bytes sent for the parameters that are reduced dense; embeddings with sparse gradients are not counted."""

    @property
    def bytes_sent(self) -> float:
        """All bytes that this worker put on the network in a step: those of the buckets and `dense_bytes_sent`."""
        return self.total.bytes_sent + self.dense_bytes_sent

    @property
    def total(self) -> BucketStats:
        """The sums over the buckets (thresholds and stages: their mean; residual norms: the root of the sum of squares)."""

        def total(field: str) -> float:
            return math.fsum(getattr(bucket, field) for bucket in self.buckets)

        summed = ("numel", "target", "count", "truncated", "bytes_sent")
        number = max(len(self.buckets), 1)
        exchanges = {bucket.exchange for bucket in self.buckets} or {""}
        return BucketStats(
            name="total",
            threshold=total("threshold") / number,
            stages=total("stages") / number,
            residual_norm=math.sqrt(math.fsum(bucket.residual_norm**2 for bucket in self.buckets)),
            exchange=exchanges.pop() if len(exchanges) == 1 else "several",
            **{field: total(field) for field in summed},
        )


@dataclass(frozen=True)
class Stats:
    """What `compression.stats()` returns."""

    steps: int
    last: StepStats
    """The last step."""
    mean: StepStats
    """A step on average over all of them: `mean.total` is the sum over the buckets of their means."""

    def __str__(self) -> str:
        """Return a table: entries, counts, achieved ratio and bytes of a worker in a step, on average over all steps."""
        rows = [("bucket", "entries", "target", "sent", "ratio", "truncated", "bytes sent")]
        for one in (*self.mean.buckets, self.mean.total):
            numbers = (one.numel, one.target, one.count, one.truncated, one.bytes_sent)
            entries, target, sent, truncated, sent_bytes = (f"{number:,.0f}" for number in numbers)
            rows.append((one.name, entries, target, sent, f"{one.ratio:.3g}", truncated, sent_bytes))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]) for name, *numbers in rows]
        dense = f"dense beside the buckets: {self.mean.dense_bytes_sent:,.0f} bytes sent"
        return "\n".join([f"mean of {self.steps} steps, for each worker and step", *lines, dense])


NO_STATS = Stats(0, StepStats((), 0.0), StepStats((), 0.0))


class Counts(NamedTuple):
    """What is known of one bucket after one step, or sums of such numbers over steps; in the order of `BucketStats`."""

    target: float = 0
    sent: float = 0
    threshold: float = 0.0
    stages: float = 0
    truncated: float = 0
    bytes_sent: float = 0

    def over(self, steps: int) -> Counts:
        """Return the means of sums over so many steps."""
        return Counts(*(total / max(steps, 1) for total in self))
