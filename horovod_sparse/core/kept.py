"""What is kept of one optimizer's parameters from step to step: residuals, velocities, adaptive state. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod_sparse.compressors.base import Compressor, Place
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.layout import Layout, check_limits
from horovod_sparse.core.preparation import Preparation
from horovod_sparse.core.residuals import Residuals, multiply
from horovod_sparse.core.selector import DeviceSelectorFor, no_device
from horovod_sparse.core.state import VERSION
from horovod_sparse.core.statistics import Counts, Stats, StepStats, Tally
from horovod_sparse.exchange.grid import grid
from horovod_sparse.ops.protocol import Array, Ops


class Kept:
    """The parameters of one optimizer, between two steps.

    Args:
        ops: the framework's operations.
        compressor: settings and algorithm.
        world: number of workers that exchange.
        position: index of this worker among them, in [0, world).
        rank: this worker's global rank, for error messages.
        averages: True if the reduced gradient is the workers' mean, False if it is their sum; `clip_norm` depends on it.
        groups: the name of each worker's host, if the exchange needs them (`Exchange.hosts`).
        device_selector: see `DeviceSelectorFor`.
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
        groups: Sequence[str] = (),
        device_selector: DeviceSelectorFor = no_device,
    ) -> None:
        self.ops = ops
        self.compressor = compressor
        self.world = world
        self.position = position
        self.rank = rank
        self.averages = averages
        self._grid = grid(groups, position) if groups else None
        self._device_selector = device_selector
        self.residuals = Residuals(ops)
        self.velocities = Residuals(ops)
        """With momentum correction: velocities of the parameters in buckets and of those that are reduced dense."""
        self.buckets: list[Bucket] = []
        self._dense: dict[str, Layout] = {}
        """Parameters that are reduced dense. Those that are reduced together are listed under the name of the first."""
        self.preparation = Preparation(ops, compressor, world, averages=averages)
        self.dense_bytes_sent = 0.0
        self.bucket_of: dict[str, Bucket] = {}
        self.in_gradients: set[str] = set()
        """Buckets that were loaded in units of the gradient, until the learning rate is known that makes them updates."""

    def add_buckets(self, layouts: Sequence[Layout], like: Callable[[str], Array]) -> None:
        """Add buckets. `like(name)` returns an array on the device where the parameter's bucket will be kept."""
        check_limits(layouts, self.compressor, self.world)
        for layout in layouts:
            self.residuals.allocate(layout, like(layout.name))
            if self.compressor.momentum_correction is not None:
                self.velocities.allocate(layout, like(layout.name))
            buffer = self.residuals.buffer(layout.name)
            velocity = self.velocities.buffer(layout.name) if self.compressor.momentum_correction is not None else None
            place = Place(layout.name, self.position, self.world)
            selector = self._device_selector
            bucket = Bucket(self.ops, self.compressor, layout, place, self.rank, buffer, velocity, selector, self._grid)
            self.buckets.append(bucket)
            self.bucket_of.update(dict.fromkeys(bucket.slots, bucket))

    @property
    def divisor(self) -> float:
        """The number by which sums of what the workers have sent are divided. It gives them this step's loss scale back."""
        return (float(self.world) if self.averages else 1.0) / self.preparation.scale

    def add_dense(self, layouts: Sequence[Layout], like: Callable[[str], Array]) -> None:
        """Register the parameters that the adapter reduces dense. Those of one layout are reduced together."""
        for layout in layouts:
            self._dense[layout.name] = layout
            if self.compressor.momentum_correction is not None:
                self.velocities.allocate(layout, like(layout.name))

    def describe(self) -> str:
        """Return how many parameters are compressed and how many are not, in a line."""
        numel, dense = sum(one.numel for one in self.buckets), sum(len(one.slots) for one in self._dense.values())
        entries = f"{numel / 1e6:.1f} M" if numel >= 1e5 else str(numel)
        return f"{len(self.buckets)} buckets, {entries} entries, {dense} parameters dense"

    @property
    def nbytes(self) -> int:
        return self.residuals.nbytes

    def drop(self, name: str) -> None:
        """Forget what is kept of a parameter that is no longer trained. Call it between steps, or before it arrives."""
        if name in self.bucket_of:
            self.residuals.view(name)[:] = 0
        if self.compressor.momentum_correction is not None:
            self.velocities.view(name)[:] = 0

    @property
    def steps(self) -> int:
        """Number of steps in `stats`, at no cost."""
        return max((bucket.tally.steps for bucket in self.buckets), default=0)

    def stats(self) -> Stats:
        """Return counts and bytes per bucket and in total, of the last step and on average. They are computed now."""
        norms = [self.ops.norm(one.buffer) for one in self.buckets]

        def of_all(counts: Callable[[Tally], Counts]) -> StepStats:
            buckets = zip(self.buckets, norms, strict=True)
            rows = [counts(one.tally).stats(one.name, one.numel, one.exchange.title, norm) for one, norm in buckets]
            return StepStats(tuple(rows), self.dense_bytes_sent)

        return Stats(self.steps, of_all(lambda tally: tally.last), of_all(Tally.mean))

    def state_dict(self) -> dict[str, Any]:
        """Return residuals and adaptive state by parameter name: arrays, numbers, strings and lists only.

        Every parameter carries a copy of its bucket's adaptive state, so that different buckets can be built from it. Residuals
        are in units of the gradient at "learning_rates": at 1.0 if they hold updates. Earlier releases have written others.
        """
        return {
            "version": VERSION,
            "residuals": self.residuals.state_dict(),
            "velocities": self.velocities.state_dict(),
            "learning_rates": self.learning_rates,
            "adaptive": {name: bucket.state.state_dict() for bucket in self.buckets for name in bucket.slots},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, and `check_state` has accepted. The buckets may differ."""
        self.residuals.load_state_dict(state["residuals"])
        if state["velocities"]:
            self.velocities.load_state_dict(state["velocities"])
        else:
            self.velocities.reset()
        rates = state["learning_rates"] if self.compressor.in_updates else {}
        self.in_gradients = {bucket.name for bucket in self.buckets if self.compressor.in_updates}
        for bucket in self.buckets:
            bucket.forget()
            bucket.state.load_state_dict(state["adaptive"][bucket.name])
            known = {name: rates[name] for name in bucket.slots if name in rates}
            if known:
                self.to_updates(bucket, known)

    @property
    def learning_rates(self) -> dict[str, float]:
        """1.0, by name, for each parameter whose residual holds updates; nothing for those whose residuals hold gradients."""
        known = [bucket for bucket in self.buckets if bucket.name not in self.in_gradients]
        return {name: 1.0 for bucket in known for name in bucket.slots} if self.compressor.in_updates else {}

    def to_updates(self, bucket: Bucket, rates: Mapping[str, float]) -> None:
        """Bring residuals that were loaded in units of the gradient to those of the update, by learning rates > 0."""
        self.in_gradients.discard(bucket.name)
        for name, rate in rates.items():
            multiply(self.residuals.view(name), rate)
        bucket.forget()
        bucket.state.rescale(max(rates.values()))

    def rescale(self, factor: float) -> None:
        """Multiply residuals and velocities by `factor`."""
        self.residuals.rescale(factor)
        self.velocities.rescale(factor)
        for bucket in self.buckets:
            bucket.forget()
            bucket.state.rescale(factor)

    def decay(self, factor: float) -> None:
        """Multiply residuals, but nothing else, by `factor`. Call it between steps, on all ranks."""
        if factor != 1.0:
            self.residuals.rescale(factor)
            for bucket in self.buckets:
                bucket.forget()

    def reset(self) -> None:
        """Start afresh: residuals are zero, adaptive state and statistics are as before the first step."""
        self.residuals.reset()
        self.velocities.reset()
        self.in_gradients = set()
        for bucket in self.buckets:
            bucket.reset()
