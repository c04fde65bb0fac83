"""Several workers' pipelines in this process, and what each worker must hold, computed in plain NumPy (`test_machine`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from cases import DENSE, NAMES, SHAPES, SIZE_OF_DENSE, Case, Step
from driver import Reduced, collective, exchange, make_pipelines

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.intake import Arrived
from horovod_sparse.core.layout import Layout, Parameter
from horovod_sparse.exchange.protocols import Exchange
from horovod_sparse.exchange.shared import Dense

Array = np.ndarray


class Expected:
    """What one worker must hold of every parameter, between two steps."""

    def __init__(self, compressor: Compressor, dtype: str) -> None:
        self.compressor = compressor
        self.residuals = {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}
        corrected = compressor.momentum_correction is not None
        self.velocities = {name: np.zeros(SHAPES.get(name, 3), dtype) for name in NAMES if corrected}

    def take_in(self, name: str, gradient: Array | None, rate: float) -> bool:
        """Take in a gradient; return whether it was finite, and did not overflow the residual."""
        residual, correction = self.residuals[name], self.compressor.momentum_correction
        if self.compressor.in_updates and rate == 0.0:
            # The update is 0, but the velocity goes on.
            if correction is not None:
                finite = gradient is not None and bool(np.isfinite(gradient).all())
                self._accelerate(name, gradient.astype(residual.dtype) if finite else 0.0)
            return True
        added, finite = np.zeros_like(residual), True
        if gradient is not None:
            converted = gradient.astype(residual.dtype)
            added = np.where(np.isfinite(converted), converted, 0)
            finite = bool(np.isfinite(converted).all())
        if correction is not None:
            added = self._moved(name, added)
        residual += added * rate if self.compressor.in_updates else added
        return _keep_finite(residual) and finite

    def _accelerate(self, name: str, gradient: Array | float) -> Array:
        """Add a gradient to the velocity; return that as it was before it was kept finite."""
        correction, velocity = self.compressor.momentum_correction, self.velocities[name]
        assert correction is not None
        velocity *= correction.momentum
        velocity += gradient
        moved = velocity.copy()
        _keep_finite(velocity)
        return moved

    def _moved(self, name: str, gradient: Array) -> Array:
        """Apply momentum to a gradient, as `MomentumCorrection` says; return what the residual takes in."""
        correction, moved = self.compressor.momentum_correction, self._accelerate(name, gradient)
        assert correction is not None
        return moved * correction.momentum + gradient if correction.nesterov else moved

    def dense(self, reduced: Array) -> Array:
        """Apply momentum to the reduced gradient of the dense parameter, which is finite."""
        return reduced if self.compressor.momentum_correction is None else self._moved(DENSE, reduced)

    def rescale(self, factor: float) -> None:
        for array in (*self.residuals.values(), *self.velocities.values()):
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
        self.pipelines = make_pipelines(case.backend, self.compressor, SHAPES, world, **where)
        layout = Layout.of([Parameter(DENSE, (SIZE_OF_DENSE,), case.residual_dtype, "cpu")])
        for pipeline in self.pipelines:
            pipeline.add_dense([layout], lambda name: np.zeros(1, np.float32))

    def buckets(self, step: Step) -> list[int]:
        """The numbers of the buckets, in the order of a step."""
        number = len(self.pipelines[0].buckets)
        return [one for one in step.order if one < number]

    def scaled(self, gradient: Array | None) -> Array | None:
        return None if gradient is None else gradient * gradient.dtype.type(self.scale)

    # --- a step ---

    def arrive(self, rank: int, names: Sequence[str], step: Step) -> None:
        """Give some gradients of one bucket to a worker."""
        pipeline = self.pipelines[rank]
        arrived = []
        for name in names:
            gradient = self.scaled(step.gradients[rank][name])
            arrived.append(Arrived(name, gradient, step.rates[name] if self.compressor.lr_in_residual else None))
        if step.together and arrived:
            pipeline.arrive_together(pipeline.bucket_of[names[0]], arrived)
        else:
            for one in arrived:
                pipeline.arrive(*one)

    def names_in(self, bucket: int, step: Step) -> list[str]:
        """The parameters of a bucket, in the order in which their gradients arrive."""
        return [name for name in step.names if name in self.pipelines[0].buckets[bucket].slots]

    def run(self, step: Step) -> list[list[Reduced]]:
        """All of a step except its end. Return what every rank got of each bucket."""
        for pipeline in self.pipelines:
            pipeline.start_step(undoes=self.case.undoes)
        order, results = self.buckets(step), {}
        for bucket in order:
            for rank in range(self.world):
                self.arrive(rank, self.names_in(bucket, step), step)
            if step.eager:
                results[bucket] = self.exchange(bucket)
        for bucket in order:
            if bucket not in results:
                results[bucket] = self.exchange(bucket)
        return [results[bucket] for bucket in sorted(results)]

    def exchange(self, bucket: int) -> list[Reduced]:
        buckets = [pipeline.buckets[bucket] for pipeline in self.pipelines]
        return exchange(self.case.backend, self.pipelines, buckets, self.divisor)

    def reduce_dense(self, step: Step) -> tuple[Array, list[Array]]:
        """Reduce the dense parameter. Return the mean, and what every rank has made of it."""
        given = [self.scaled(gradients[DENSE]) for gradients in step.gradients]
        wide = self.case.residual_dtype
        total = np.zeros(SIZE_OF_DENSE, wide)
        for rank, gradient in enumerate(given):
            total += 0 if gradient is None else gradient.astype(wide)
            self.arrive(rank, [DENSE], step)
        dense = [pipeline.dense[0] for pipeline in self.pipelines]
        results = exchange(self.case.backend, self.pipelines, dense, self.divisor)
        parts = [result[DENSE] for result in results]
        return total / np.dtype(wide).type(self.divisor), [part[0][1] for part in parts if part]

    def end(self) -> list[bool]:
        """End the step; return whether it raised, for every rank."""
        raised = []
        for pipeline in self.pipelines:
            try:
                pipeline.end_step()
                raised.append(False)
            except FloatingPointError:
                raised.append(True)
        return raised

    def run_in_part(self, step: Step, arrived: Sequence[int], exchanged: int, *, begun: bool) -> list[list[str]]:
        """A step that stops when `arrived` parameters have arrived on each rank. Return their names.

        `exchanged` buckets that are complete on all ranks are exchanged, and the others are begun, if they are at all.
        """
        flat = [(bucket, name) for bucket in self.buckets(step) for name in self.names_in(bucket, step)]
        reached = []
        for rank, pipeline in enumerate(self.pipelines):
            pipeline.start_step(undoes=self.case.undoes)
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
                ready = [(one, one.buckets[bucket]) for one, done in zip(self.pipelines, complete, strict=True) if done]
                requests = [one.begin() for _, one in ready]
                assert not requests or collective(self.case.backend, requests)
        return reached

    # --- what it holds ---

    def exchange_of(self, step: int) -> Exchange:
        first = self.compressor.first_sparse_step(self.world)
        return Dense() if step < first else self.compressor.exchange

    def state_dicts(self) -> list[dict[str, Any]]:
        return [pipeline.state_dict() for pipeline in self.pipelines]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Load states, perhaps of another number of workers."""
        for rank, pipeline in enumerate(self.pipelines):
            pipeline.load_state_dict(states[rank % len(states)])

    def change_scale(self, factor: float) -> None:
        """Let the loss be `factor` times as large from now on."""
        self.scale *= factor
        for pipeline in self.pipelines:
            pipeline.rescale(factor)
