"""One worker's steps on made-up gradients. What other workers send is made outside of the timed parts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from selection_rows import Conditions, Draw, Row, Spent, laplace

from horovod_sparse.compressors.base import BucketState
from horovod_sparse.core.layout import Parameter, Slot, layouts_of
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.exchange import wire
from horovod_sparse.exchange.protocols import Collective, Reduced
from horovod_sparse.exchange.union import Union
from horovod_sparse.numpy.compiled import host_ops
from horovod_sparse.numpy.ops import NumpyOps
from horovod_sparse.ops.protocol import Array, Ops

_ALIGNMENT = 16
"""Number of elements in a cache line."""


@dataclass(frozen=True)
class Backend:
    """A framework's arrays on the CPU."""

    ops: Ops
    like: Array
    """Any array of the framework."""
    join: Callable[[list[Array]], Array]
    host: Callable[[Array], NDArray[Any]]
    """Returns an array's memory."""

    def zeros(self, size: int) -> Array:
        """Return zeros in memory that has been written to. The system provides memory only then."""
        array: Array = self.ops.zeros(size, "float32", self.like)
        self.host(array).fill(0.0)
        return array


def make_backend(name: str, threads: int) -> Backend:
    """Return the back end "torch", which needs PyTorch and Horovod for it, or "numpy"."""
    if name == "numpy":
        return Backend(host_ops(threads), np.zeros(1, np.float32), np.concatenate, np.asarray)
    import torch

    from horovod_sparse.torch.compiled import tensor_ops

    torch.set_num_threads(threads)
    return Backend(tensor_ops(), torch.zeros(1), torch.cat, torch.Tensor.numpy)


class Gradients:
    """Endless gradients of one size. Each begins at another place of a longer array, so none comes again."""

    def __init__(self, backend: Backend, size: int, draw: Draw = laplace) -> None:
        self._size = size
        self._room = max(size // 4, _ALIGNMENT)
        self._rng = np.random.default_rng(0)
        self._entries = backend.zeros(size + self._room)
        backend.host(self._entries)[:] = draw(self._rng, size + self._room)

    def next(self) -> Array:
        """Return a gradient, in the framework's own memory."""
        start = _ALIGNMENT * int(self._rng.integers(self._room // _ALIGNMENT))
        return self._entries[start : start + self._size]


class Worker:
    """A pipeline with one bucket of one parameter, the first of `row.world` workers.

    The reduced gradient is written to `dense`, unless this is None.
    """

    def __init__(self, backend: Backend, row: Row, conditions: Conditions, dense: Array | None = None) -> None:
        self._backend, self._row, self._conditions, self._dense = backend, row, conditions, dense
        self.compressor = row.make(conditions.ratio)
        self._pipeline = Pipeline(backend.ops, self.compressor, world=row.world, position=0, rank=0)
        layouts = layouts_of([Parameter("p", (conditions.size,), "float32", "cpu")], self.compressor)
        self._pipeline.add_buckets(layouts, lambda name: backend.like)
        (self._bucket,) = self._pipeline.buckets
        self.residual = backend.host(self._bucket.buffer)
        # The system provides memory when it is first written to. That is not part of a step.
        self.residual.fill(0.0)
        self._former: list[Array] = []
        """This worker's messages of the last steps."""

    def step(self, gradient: Array) -> Spent:
        self._before = replace(self._bucket.state)
        begun = time.perf_counter()
        self._pipeline.arrive("p", gradient)
        request: Collective | None = self._bucket.begin()
        compress, last = time.perf_counter() - begun, 0.0
        while request is not None:
            answer = self._answer(request)
            compress += last
            begun = time.perf_counter()
            request = self._pipeline.advance(self._bucket, answer, 1.0, self._write)
            last = time.perf_counter() - begun
        begun = time.perf_counter()
        self._pipeline.end_step()
        return Spent(compress + time.perf_counter() - begun, last)

    def _write(self, slots: Sequence[Slot], reduced: Reduced) -> None:
        self._reduced = reduced
        if self._dense is not None:
            reduced.write([(slots[0].offset, self._dense)])

    def _answer(self, request: Collective) -> Array:
        if self._row.world == 1 or request.kind == "allreduce":
            # What others add does not change the work that is left.
            return request.message
        if isinstance(self.compressor.exchange, Union):
            return self._backend.join([request.message, *self._other_parts(len(request.message) - wire.HEADER)])
        # The others send what this worker has sent before.
        self._former = [self._backend.ops.copy(request.message), *self._former][: self._row.world]
        others = [self._former[min(number, len(self._former) - 1)] for number in range(1, self._row.world)]
        return self._backend.join([request.message, *others])

    def _other_parts(self, capacity: int) -> list[Array]:
        """Return what the other workers of exchange `union` send, if all have this worker's gradients."""
        messages = []
        for position in range(1, self._row.world):
            state = self._state_of(position)
            indices = self._select(self._backend.ops, self._bucket.buffer, state)
            header = [self._bucket.state.checksum(), wire.float_bits(state.proposal)]
            messages.append(self._backend.ops.pack_indices(indices, header, capacity))
        return messages

    def _state_of(self, position: int) -> BucketState:
        """Return a worker's state before the last step."""
        return replace(self._before, place=replace(self._before.place, position=position))

    def _select(self, ops: Ops, x: Array, state: BucketState) -> Array:
        k = self.compressor.target_count(len(x))
        return self.compressor.select(
            ops, x, k, self.compressor.message_capacity(len(x), k, self._row.world), state
        ).indices

    def check(self) -> None:
        """Raise AssertionError unless the last step sent about k entries, the same as the NumPy oracle selects."""
        entries = self._reduced.parts()[0]
        x = self.residual.copy()
        indices = np.arange(len(x)) if entries.indices is None else self._backend.host(entries.indices)
        # What was sent is no longer in the residual. Together the two are what was selected from.
        assert not x[indices].any(), f"{self._row.title}: what was sent is still in the residual"
        x[indices] = self._backend.host(entries.values)
        selecting = self._row.world if isinstance(self.compressor.exchange, Union) else 1
        due = np.concatenate([self._select(NumpyOps(), x, self._state_of(number)) for number in range(selecting)])
        title = f"{self._row.title}, {self._conditions}"
        assert np.array_equal(indices, np.sort(due)), f"{title}: sent {len(indices)} entries, {len(due)} were due"
        k = max(self.compressor.target_count(len(x)), selecting)
        fewest, most = math.floor(0.5 * k), math.ceil(2.0 * k)
        assert fewest <= len(indices) <= most, f"{title}: sent {len(indices)} entries, {fewest} to {most} were due"
