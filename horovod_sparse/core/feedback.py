"""The residual buffer manager: all that outlives a step, by parameter name. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from horovod_sparse.compressors.base import Compressor, Place
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.intake import Intake
from horovod_sparse.core.layout import Layout
from horovod_sparse.core.plan import first_sparse_step
from horovod_sparse.core.residuals import Residuals
from horovod_sparse.core.selector import DeviceSelectorFor
from horovod_sparse.core.state import VERSION, check_state
from horovod_sparse.core.statistics import BucketStats, Counts, Stats, StepStats
from horovod_sparse.ops.protocol import Array, Ops


class Feedback:
    """What a worker keeps of the parameters of one model from step to step. `core.step.Step` is what changes it.

    Args:
        ops: the framework's operations.
        compressor: settings and algorithm.
        world: number of workers that exchange.
        position: index of this worker among them, in [0, world).
        rank: this worker's global rank, for error messages.
        averages: True if the reduced gradient is the workers' mean, False if it is their sum; `clip` depends on it.
        device_selector: see `DeviceSelectorFor`.
        speaks: whether the first worker writes the log. Where several groups of workers train one model, one of them does.
    """

    def __init__(
        self,
        ops: Ops,
        compressor: Compressor,
        *,
        world: int,
        position: int,
        rank: int,
        averages: bool = True,
        device_selector: DeviceSelectorFor = lambda *bucket: None,
        speaks: bool = True,
    ) -> None:
        self.ops, self.compressor = ops, compressor
        self.world, self.position, self.rank = world, position, rank
        self.speaks = speaks and position == 0
        """Whether this worker writes the log for all."""
        self._device_selector = device_selector
        self.residuals = Residuals(ops)
        self.velocities = Residuals(ops)
        """With momentum before the selection."""
        self.buckets: list[Bucket] = []
        """In the same order on all ranks."""
        self.bucket_of: dict[str, Bucket] = {}
        """The bucket of each parameter, by name."""
        self.new_intake = partial(Intake, ops, compressor, world, averages=averages)
        self.intake = self.new_intake()
        """That of gradients without a loss scale."""
        self.is_broken = False
        """Whether an exchange has ended by an exception, so that nobody knows what the other ranks have."""
        self.warned = self.warned_not_finite = False
        """Whether this worker has warned of messages that are too small, and of gradients that are not finite."""

    def add_buckets(self, layouts: Sequence[Layout], like: Callable[[str], Array]) -> None:
        """Add buckets. `like(name)` returns an array on the device where the parameter's bucket will be kept."""
        ratio = self.compressor.schedule.ratio(first_sparse_step(self.compressor, self.world))
        for layout in layouts:
            array, place = like(layout.name), Place(layout.name, self.position, self.world, ratio, layout.numel)
            buffer = self.residuals.allocate(layout, array)
            velocity = None if self.compressor.momentum is None else self.velocities.allocate(layout, array)
            memory, selector = (buffer, velocity), self._device_selector
            speaks = self.speaks and not layout.is_dense and not self.compressed
            bucket = Bucket(self.ops, self.compressor, layout, place, self.rank, *memory, selector, speaks=speaks)
            self.buckets.append(bucket)
            self.bucket_of.update(dict.fromkeys(bucket.slots, bucket))

    @property
    def compressed(self) -> list[Bucket]:
        """The buckets that are not always dense."""
        return [bucket for bucket in self.buckets if not bucket.layout.is_dense]

    @property
    def steps(self) -> int:
        """Number of steps in `stats`, at no cost."""
        return max((bucket.steps for bucket in self.buckets), default=0)

    def stats(self) -> Stats:
        """Return counts and bytes per bucket and in total, of the last step and on average. They are computed now."""
        compressed = self.compressed
        norms = [self.ops.norm(one.buffer) for one in compressed]
        dense = math.fsum(one.stage.bytes_sent for one in self.buckets if one.layout.is_dense)

        def of_all(counts: Callable[[Bucket], Counts]) -> StepStats:
            buckets = zip(compressed, norms, strict=True)
            rows = [BucketStats(b.name, b.numel, *counts(b), norm, b.exchange.title) for b, norm in buckets]
            return StepStats(tuple(rows), dense)

        return Stats(
            self.steps, of_all(lambda bucket: bucket.last), of_all(lambda bucket: bucket.sums.over(bucket.steps))
        )

    def warn_truncated(self) -> None:
        """Warn once if messages lack room."""
        for bucket in () if self.warned else self.buckets:
            if bucket.truncated_steps:
                self.warned |= bucket.warn_truncated()

    # --- state, between two steps ---

    def state_dict(self) -> dict[str, Any]:
        """Return residuals and adaptive state by parameter name: arrays, numbers, strings and lists only.

        Every parameter carries a copy of its bucket's adaptive state, so that different buckets can be built from it. Lists in
        these copies are the same objects.
        "lr_in_residual" says whether residuals hold updates, or gradients.
        """
        return {
            "version": VERSION,
            "lr_in_residual": self.compressor.lr_in_residual,
            "residuals": self.residuals.state_dict(),
            "velocities": self.velocities.state_dict(),
            "adaptive": {
                name: {**one} for bucket in self.buckets for one in [bucket.state.state_dict()] for name in bucket.slots
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, if `check_state` accepts it. The buckets may differ."""
        check_state(state, self.compressor, self.residuals.shapes)
        self.is_broken = False
        self.residuals.load_state_dict(state["residuals"])
        self.velocities.load_state_dict(state["velocities"])
        for bucket in self.buckets:
            bucket.forget()
            bucket.state.load_state_dict(state["adaptive"][bucket.name])
            bucket.go_on(bucket.state)

    def rescale(self, factor: float) -> None:
        """Multiply residuals and velocities by `factor`."""
        if factor != 1.0:
            self.residuals.rescale(factor)
        self.velocities.rescale(factor)
        for bucket in self.buckets:
            bucket.forget()
            bucket.state.rescale(factor)

    def reset(self) -> None:
        """Start afresh: residuals are zero, adaptive state and statistics are as before the first step."""
        self.is_broken = False
        self.residuals.reset()
        self.velocities.reset()
        for bucket in self.buckets:
            bucket.reset()
