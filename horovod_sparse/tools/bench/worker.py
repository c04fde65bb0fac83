"""Times one worker's steps. Makes what other workers send, outside of the timed parts. Imports no framework."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.compressors.base import Place
from horovod_sparse.compressors.threshold import Threshold
from horovod_sparse.core.layout import Parameter, Slot, plan
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.exchange import wire
from horovod_sparse.exchange.protocols import Collective, Reduced
from horovod_sparse.ops.protocol import Array, Ops
from horovod_sparse.tools.bench.checks import Sent
from horovod_sparse.tools.bench.rows import DATA, Row

ALIGNMENT = 16
"""Number of elements in a cache line."""


@dataclass(frozen=True)
class Backend:
    """A framework's arrays on the CPU."""

    ops: Ops
    like: Array
    """Any array of the framework."""
    host: Callable[[Array], NDArray[Any]]
    """Returns an array's memory."""
    join: Callable[[list[Array]], Array]


class Gradients:
    """Endless gradients of one size. Each begins at another place of a longer array, so none comes again."""

    def __init__(self, backend: Backend, size: int, seed: int = 0) -> None:
        self._backend = backend
        self._size = size
        self._room = max(size // 4, ALIGNMENT)
        self._rng = np.random.default_rng(seed)
        self._kept: dict[str, Array] = {}

    def next(self, data: str) -> Array:
        if data not in self._kept:
            # Use the framework's own memory, where gradients are.
            self._kept[data] = self._backend.ops.zeros(self._size + self._room, "float32", self._backend.like)
            self._backend.host(self._kept[data])[:] = DATA[data](self._rng, self._size + self._room)
        start = ALIGNMENT * int(self._rng.integers(self._room // ALIGNMENT))
        return self._kept[data][start : start + self._size]


class Worker:
    """A pipeline with one bucket of one parameter, the first of `row.world` workers."""

    def __init__(
        self, backend: Backend, row: Row, ratio: float, size: int, dense: Array, *, whole: bool = False
    ) -> None:
        self.backend = backend
        self.row = row
        self._whole = whole
        """True if the parts of a step before and after the last collective are both timed."""
        self.ratio = ratio
        self.size = size
        self._dense = dense
        """The array that the reduced gradient is written to."""
        self.start()

    def start(self) -> None:
        """Start a new pipeline, with nothing kept from earlier steps."""
        compressor = self.row.make(self.ratio)
        self.pipeline = Pipeline(self.backend.ops, compressor, world=self.row.world, position=0, rank=0)
        self.pipeline.add_buckets(
            plan([Parameter("p", (self.size,), "float32", "cpu")], compressor), lambda name: self.backend.like
        )
        (self.bucket,) = self.pipeline.buckets
        # The system provides memory when it is first written to. That is not part of a step.
        self.backend.host(self.bucket.buffer).fill(0.0)
        if self.bucket.velocity is not None:
            self.backend.host(self.bucket.velocity).fill(0.0)
        self._former: list[Array] = []
        """This worker's messages of the last steps."""
        self._reduced: Reduced | None = None

    def step(self, gradient: Array) -> float:
        """Take a step, and return the seconds of the part that the row times.

        This is the part until the last collective, and the end of the step. With `row.receives` it is the part between those,
        and with `whole` all of it.
        """
        pipeline, bucket = self.pipeline, self.bucket
        if isinstance(pipeline.compressor, Threshold):
            self._set_threshold(pipeline.compressor, gradient)
        begun = time.perf_counter()
        pipeline.arrive("p", gradient)
        request: Collective | None = pipeline.begin(bucket)
        compress = time.perf_counter() - begun
        while request is not None:
            answer = self._answer(request)
            begun = time.perf_counter()
            request = pipeline.advance(bucket, answer, 1.0, self._write)
            last = time.perf_counter() - begun
            compress += 0.0 if request is None else last
        begun = time.perf_counter()
        pipeline.end_step()
        compress += time.perf_counter() - begun
        if self._whole:
            return compress + last
        return last if self.row.receives else compress

    def _set_threshold(self, compressor: Threshold, gradient: Array) -> None:
        # A fixed threshold sends more in every step until residuals are as large as the threshold, after 1/ratio steps. But
        # the cost of sending about k entries is wanted. So a sample gives the threshold that sends about k in this step.
        stride = max(1, self.size // 100_000)
        sample = self.backend.host(self.bucket.buffer)[::stride] + self.backend.host(gradient)[::stride]
        compressor.threshold = float(np.quantile(np.abs(sample), 1.0 - self.ratio))

    # --- the other workers ---

    def _answer(self, request: Collective) -> Array:
        if self.row.world == 1 or request.kind == "allreduce":
            # What others add does not change the work that is left.
            return request.message
        if len(request.message.shape) == 1:
            return self.backend.join([request.message, *self._other_parts()])
        # The others send what this worker has sent before.
        self._former = [self.backend.ops.copy(request.message), *self._former][: self.row.world]
        others = [self._former[min(number, len(self._former) - 1)] for number in range(1, self.row.world)]
        return self.backend.join([request.message, *others])

    def _other_parts(self) -> list[Array]:
        """Return what the other workers of exchange `union` select from their parts, if all have this worker's gradients."""
        compressor, bucket, ops = self.pipeline.compressor, self.bucket, self.backend.ops
        messages = []
        for position in range(1, self.row.world):
            state = replace(bucket.state, place=Place(bucket.name, position, self.row.world))
            selection = compressor.select(ops, bucket.buffer, bucket.k, bucket.capacity, state)
            header = [bucket.checksum(), wire.float_bits(state.proposal)]
            messages.append(ops.pack_indices(selection.indices, header, bucket.capacity))
        return messages

    def _write(self, slots: Sequence[Slot], reduced: Reduced) -> None:
        self._reduced = reduced
        if self.row.receives or self._whole:
            reduced.write([(slots[0].offset, self._dense)])

    # --- what came of it ---

    def check(self) -> None:
        """Raise AssertionError if the last step did not select what it had to."""
        task_k = self.pipeline.compressor.asked(self.size)
        capacity = self.pipeline.compressor.room(self.size, task_k, self.row.world)
        assert self._reduced is not None
        entries = self._reduced.parts()[0]
        values = self.backend.host(entries.values)
        indices = np.arange(self.size) if entries.indices is None else self.backend.host(entries.indices)
        # What was sent is no longer in the residual. Together the two are what was selected from.
        x = self.backend.host(self.bucket.buffer).copy()
        assert not x[indices].any(), "what was sent is still in the residual"
        x[indices] = values
        try:
            self.row.check(Sent(x, indices, task_k, capacity, self.bucket.state))
        except AssertionError as error:
            raise AssertionError(f"{self.row.title}, {self.size} elements, ratio {self.ratio}: {error}") from error


class Verbs:
    """Array verbs that record how long they take."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.seconds: dict[str, float] = defaultdict(float)

    @classmethod
    def of(cls, backend: Backend) -> tuple[Backend, Verbs]:
        """Return a backend with such verbs, and the verbs."""
        verbs = cls(backend.ops)
        return replace(backend, ops=cast(Ops, verbs)), verbs

    def __getattr__(self, name: str) -> Callable[..., Any]:
        verb = getattr(self._ops, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return verb(*arguments, **options)
            finally:
                self.seconds[name] += time.perf_counter() - begun

        return timed
