"""Several workers in this process, and what each worker must hold, computed in plain NumPy (`tests/core/test_machine.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.layout import Layout, Parameter, Slot
from horovod_sparse.core.plan import first_sparse_step
from horovod_sparse.exchange import protocols
from horovod_sparse.exchange.protocols import Exchange
from horovod_sparse.exchange.shared import Dense
from tests.harness.cases import DENSE, SHAPES, SIZE_OF_DENSE, Case, Step
from tests.harness.workers import Reduced, collective, exchange, make_workers, reduced_of

Array = np.ndarray


class Expected:
    """What one worker must hold of every parameter, between two steps."""

    def __init__(self, compressor: Compressor, dtype: str) -> None:
        self.compressor = compressor
        shapes = {**SHAPES, DENSE: (SIZE_OF_DENSE,)}
        self.residuals = {name: np.zeros(shape, dtype) for name, shape in shapes.items()}
        self.aside: dict[str, Array] = {}
        """What waits of parameters that had no gradient in the last step. Their residuals are zero."""
        self.taken: list[tuple[str, Array, float]] = []
        """What has been added to residuals in this step, and its rate."""
        self.copies: dict[str, tuple[Array, Array]] = {}
        """With momentum: residuals and velocities before this step's gradients."""
        corrected = compressor.momentum_correction is not None
        self.velocities = {name: np.zeros(shape, dtype) for name, shape in shapes.items() if corrected}

    @property
    def waiting(self) -> dict[str, Array]:
        """What waits of each parameter."""
        return self.residuals | self.aside

    def take_in(self, name: str, gradient: Array | None, rate: float) -> bool:
        """Take in a gradient; return whether it was finite, and did not overflow the residual."""
        if gradient is None:
            if self.residuals[name].any():
                self.aside[name], self.residuals[name] = self.residuals[name], np.zeros_like(self.residuals[name])
            return True
        residual = self.residuals[name] = self.aside.pop(name, self.residuals[name])
        converted = gradient.astype(residual.dtype)
        finite = bool(np.isfinite(converted).all())
        added = np.where(np.isfinite(converted), converted, 0)
        if self.velocities:
            self.copies[name] = residual.copy(), self.velocities[name].copy()
        if not self.compressor.lr_in_residual:
            rate = 1.0
        elif rate == 0.0:
            # The update is 0, but the velocity goes on.
            if self.velocities:
                self._accelerate(name, converted if finite else 0.0)
            return True
        if self.velocities:
            added = self._accelerate(name, added)
        self.taken.append((name, added, rate))
        residual += added * rate
        return _keep_finite(residual) and finite

    def undo(self) -> None:
        """Take this step's gradients out again."""
        for name, added, rate in () if self.velocities else self.taken:
            self.residuals[name] += added * -rate
            _keep_finite(self.residuals[name])
        for name, (residual, velocity) in self.copies.items():
            self.residuals[name], self.velocities[name] = residual, velocity
        self.end()

    def end(self) -> None:
        self.taken, self.copies = [], {}

    def load(self) -> None:
        """A state does not tell what was set aside."""
        self.residuals, self.aside = self.waiting, {}

    def _accelerate(self, name: str, gradient: Array | float) -> Array:
        """Add a gradient to the velocity; return that as it was before it was kept finite."""
        correction, velocity = self.compressor.momentum_correction, self.velocities[name]
        assert correction is not None
        velocity *= correction.momentum
        velocity += gradient
        moved = velocity.copy()
        _keep_finite(velocity)
        return moved

    def rescale(self, factor: float) -> None:
        for array in (*self.residuals.values(), *self.aside.values(), *self.velocities.values()):
            array *= factor
            _keep_finite(array)


def within_range(array: Array) -> Array:
    """Return a copy in which infinities are the largest number of the type."""
    largest = np.finfo(array.dtype).max
    return np.clip(array, -largest, largest)


def _keep_finite(array: Array) -> bool:
    """Bring infinities back to the largest number, in place; return whether there were none."""
    finite = bool(np.isfinite(array).all())
    array[...] = within_range(array)
    return finite


class World:
    """The workers. `scale` is what their gradients are multiplied by."""

    def __init__(self, case: Case, world: int, granularity: str | int) -> None:
        self.case, self.world, self.granularity, self.scale = case, world, granularity, 1.0
        self.compressor = case.compressor(granularity)
        self.divisor = float(world) if case.averages else 1.0
        where: dict[str, Any] = {"dtype": case.residual_dtype, "averages": case.averages}
        self.workers = make_workers(case.backend, self.compressor, SHAPES, world, **where)
        layout = Layout.of([Parameter(DENSE, (SIZE_OF_DENSE,), case.residual_dtype, "cpu")], is_dense=True)
        for worker in self.workers:
            worker.add_buckets([layout], lambda name: np.zeros(1, np.float32))

    def buckets(self, step: Step) -> list[int]:
        """The numbers of the buckets, in the order of a step; the dense one comes last."""
        dense = len(self.workers[0].compressed)
        return [*(one for one in step.order if one < dense), dense]

    def scaled(self, gradient: Array | None) -> Array | None:
        return None if gradient is None else gradient * gradient.dtype.type(self.scale)

    # --- a step ---

    def arrive(self, rank: int, names: Sequence[str], step: Step) -> None:
        """Give some gradients of one bucket to a worker."""
        worker = self.workers[rank]
        for name in names:
            gradient = self.scaled(step.gradients[rank][name])
            worker.arrive(name, gradient, step.rates[name] if self.compressor.lr_in_residual else None)

    def names_in(self, bucket: int, step: Step) -> list[str]:
        """The parameters of a bucket, in the order in which their gradients arrive."""
        return [name for name in (*step.names, DENSE) if name in self.workers[0].buckets[bucket].slots]

    def run(self, step: Step) -> list[Reduced]:
        """Take a step. Return what every rank has written."""
        for worker in self.workers:
            worker.start_step()
        order = self.buckets(step)
        for bucket in order:
            for rank in range(self.world):
                self.arrive(rank, self.names_in(bucket, step), step)
            if step.eager:
                self.exchange(bucket)
        for bucket in () if step.eager else order:
            self.exchange(bucket)
        return [self.end(rank) for rank in range(self.world)]

    def exchange(self, bucket: int) -> None:
        buckets = [worker.buckets[bucket] for worker in self.workers]
        exchange(self.case.backend, self.workers, buckets, self.divisor)

    def end(self, rank: int, gone: int | None = None) -> Reduced:
        """End a rank's step, which another rank may have given up. Return what was written."""
        written: Reduced = {}

        def write(slots: Sequence[Slot], reduced: protocols.Reduced) -> None:
            written.update(reduced_of(self.case.backend, slots, reduced))

        def everyone(mine: Any) -> list[Any]:
            return [{**mine, "rank": one, "given up": one == gone} for one in range(self.world)]

        self.workers[rank].end_step(write, everyone)
        return written

    def run_given_up(self, step: Step, gone: int, arrived: int) -> list[list[str]]:
        """A step that one rank gives up when `arrived` parameters have arrived. Return what each rank has added."""
        flat = [(bucket, name) for bucket in self.buckets(step) for name in self.names_in(bucket, step)]
        reached = [[name for _, name in (flat[:arrived] if rank == gone else flat)] for rank in range(self.world)]
        for worker in self.workers:
            worker.start_step()
        for bucket in self.buckets(step):
            names = self.names_in(bucket, step)
            for rank, worker in enumerate(self.workers):
                self.arrive(rank, [name for name in names if name in reached[rank]], step)
                if rank == gone and not set(names).issubset(reached[rank]):
                    worker.spoil(worker.buckets[bucket])
            self.exchange(bucket)
        return self.added(reached)

    def added(self, reached: Sequence[Sequence[str]]) -> list[list[str]]:
        """Return what residuals have of what has arrived: these arrays are small, and wait until their bucket is complete."""
        slots = {name: set(bucket.slots) for bucket in self.workers[0].buckets for name in bucket.slots}
        return [[name for name in names if slots[name].issubset(names)] for names in reached]

    def run_in_part(self, step: Step, arrived: Sequence[int], exchanged: int, *, begun: bool) -> list[list[str]]:
        """A step that stops when `arrived` parameters have arrived on each rank. Return the names of those that were added.

        `exchanged` buckets that are complete on all ranks are exchanged, and the others are begun, if they are at all.
        """
        flat = [(bucket, name) for bucket in self.buckets(step) for name in self.names_in(bucket, step)]
        reached = []
        for rank, worker in enumerate(self.workers):
            worker.start_step()
            taken = flat[: arrived[rank % len(arrived)]]
            for bucket in self.buckets(step):
                self.arrive(rank, [name for number, name in taken if number == bucket], step)
            reached.append([name for _, name in taken])
        for number, bucket in enumerate(self.buckets(step)):
            names = set(self.names_in(bucket, step))
            complete = [names.issubset(taken) for taken in reached]
            if all(complete) and number < exchanged:
                self.exchange(bucket)
            elif begun:
                ready = [(one, one.buckets[bucket]) for one, done in zip(self.workers, complete, strict=True) if done]
                requests = [worker.sending(one).begin() for worker, one in ready]
                assert not requests or collective(self.case.backend, requests)
        return self.added(reached)

    # --- what it holds ---

    def is_dense(self, bucket: Bucket, step: int) -> bool:
        return bucket.layout.is_dense or step < first_sparse_step(self.compressor, self.world)

    def exchange_of(self, bucket: Bucket, step: int) -> Exchange:
        return Dense() if self.is_dense(bucket, step) else self.compressor.exchange

    def state_dicts(self) -> list[dict[str, Any]]:
        return [worker.state_dict() for worker in self.workers]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Load states, perhaps of another number of workers."""
        for rank, worker in enumerate(self.workers):
            worker.load_state_dict(states[rank % len(states)])

    def change_scale(self, factor: float) -> None:
        """Let the loss be `factor` times as large from now on."""
        self.scale *= factor
        for worker in self.workers:
            worker.rescale(factor)
