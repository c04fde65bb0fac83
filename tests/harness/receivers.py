"""What workers have sent, recorded from real compressors, and the receiving side of a backend with guarded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse import compressors
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.sending import Sending
from horovod_sparse.exchange.protocols import Exchange, Reduced
from horovod_sparse.public import Pairs, Union
from tests.harness.table import ORACLE, Backend
from tests.harness.workers import make_worker, make_workers, take_step

WORLD = 4
GUARD = 64
"""Elements around every array that is written to. They must not change."""
SENTINEL = -12345.0


CASES: dict[str, Compressor] = {
    "pairs": compressors.TopK(0.2, slack=1.3, warmup=None),
    "pairs, full": compressors.TopK(0.3, warmup=None),
    "pairs, one row": compressors.TopK(0.01, warmup=None),
    "pairs, estimated": compressors.SIDCo(0.2, warmup=None),
    "pairs, float64": compressors.TopK(0.2, slack=1.3, warmup=None),
    "pairs, packed": compressors.TopK(0.2, slack=1.3, exchange=Pairs("packed"), warmup=None),
    "pairs, drawn": compressors.RandomK(0.2, exchange=Pairs(), warmup=None),
    "indices": compressors.MiCRO(0.2, warmup=None),
    "indices, of all": compressors.TopK(0.2, slack=1.3, exchange=Union(), warmup=None),
    "values": compressors.RandomK(0.2, warmup=None),
    "values, blocks": compressors.RandomBlock(0.2, warmup=None),
    "dense": compressors.NoOp(),
    "dense, float64": compressors.NoOp(),
}
SIZES = (23, 1, 40)
SHAPES = {f"p{number}": (size,) for number, size in enumerate(SIZES)}
"""Of the parameters of the bucket."""


@dataclass(frozen=True)
class Recorded:
    """What the workers have sent in one step, and what each was about to do next."""

    compressor: Compressor
    numel: int
    capacity: int
    dtype: str
    state: dict[str, Any]
    """The first worker's, before the selection. Its residual holds the gradients of the step."""
    messages: list[np.ndarray]
    """Those of the first collective."""

    @property
    def exchange(self) -> Exchange:
        return self.compressor.exchange


def record(name: str) -> Recorded:
    """Let workers of one of `CASES` make a step, and the messages of the next."""
    rng, compressor = np.random.default_rng(5), CASES[name]
    compressor.min_numel, compressor.granularity = 0, "model"
    dtype = "float64" if name.endswith("float64") else "float32"
    workers = make_workers(ORACLE, compressor, SHAPES, WORLD, dtype=dtype)
    buckets = [worker.buckets[0] for worker in workers]
    first, second = (
        [{name: rng.laplace(size=shape).astype(dtype) for name, shape in SHAPES.items()} for _ in workers]
        for _ in range(2)
    )
    take_step(ORACLE, workers, first)
    for worker, given in zip(workers, second, strict=True):
        for name, gradient in given.items():
            worker.arrive(name, gradient)
    state = workers[0].state_dict()
    messages = [one.sending(bucket).begin().message for one, bucket in zip(workers, buckets, strict=True)]
    return Recorded(compressor, buckets[0].numel, buckets[0].stage.capacity, dtype, state, messages)


class Receiver:
    """The first worker, with one backend, and guarded memory for the reduced gradients."""

    def __init__(self, backend: Backend, recorded: Recorded) -> None:
        self.backend, self.recorded = backend, recorded
        self._worker = make_worker(backend, recorded.compressor, SHAPES, world=WORLD, dtype=recorded.dtype)
        self._worker.load_state_dict(recorded.state)
        ends = np.cumsum([size + GUARD for size in SIZES]).tolist()
        self._pristine = np.full(ends[-1] + GUARD, SENTINEL, recorded.dtype)
        self._memory = backend.array(self._pristine)
        self._host = backend.numpy(self._memory)
        self._places = [slice(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
        self.inside = np.concatenate([np.arange(place.start, place.stop) for place in self._places])
        """The places of the bucket's entries in the memory."""
        firsts = np.cumsum([0, *SIZES]).tolist()
        self._parts = [(first, self._memory[place]) for first, place in zip(firsts, self._places, strict=False)]
        self._untouched = self._pristine.tobytes()

    def receive(self, results: Sequence[np.ndarray]) -> str | np.ndarray | None:
        """Return the error, or the sums as they are in memory, guards included; None if a gradient was not finite."""
        worker, written = self._worker, list[np.ndarray]()
        (bucket,) = worker.buckets

        def write(slots: Any, reduced: Reduced) -> None:
            if reduced.sent is not None:
                reduced.write(self._parts)
                written.append(self._written())

        # It gives up the step before.
        worker.start_step()
        for name, shape in SHAPES.items():
            worker.arrive(name, self.backend.array(np.zeros(shape, self.recorded.dtype)))
        sending = worker.sending(bucket)
        assert isinstance(sending, Sending)
        sending.begin()
        try:
            for result in results:
                if worker.advance(bucket, self.backend.array(result)) is None:
                    write(bucket.layout.slots, Reduced(sending.ops, sending.sent_by_all, float(WORLD), sending.rates))
                    break
        except RuntimeError as error:
            assert self._host.tobytes() == self._untouched, "something was written before the error"
            return str(error)
        # What the worker has learned must be something that can be saved and loaded.
        bucket.state.load_state_dict(bucket.state.state_dict())
        assert 0 <= sending.outcome.sent <= bucket.numel
        return written[0] if written else None

    def rows_in_use(self, messages: np.ndarray) -> list[int]:
        """Return what the backend says of the indices of many messages, which may be pairs."""
        flat = self.backend.array(
            messages.reshape(-1, messages.shape[-1]) if messages.ndim == 3 else messages.reshape(-1)
        )
        indices = flat[:, 0] if messages.ndim == 3 else flat
        return list(self.backend.ops.rows_in_use(indices, len(messages), self.recorded.numel))

    def unpacked(self, messages: np.ndarray) -> np.ndarray:
        """Return the messages of pairs that many shorter ones stand for."""
        gathered = self.backend.array(messages.reshape(-1))
        pairs = self.backend.ops.unquantize(gathered, len(messages), self.recorded.numel)
        return self.backend.numpy(pairs).reshape(len(messages), -1, 2)

    def assemble(self, messages: np.ndarray, used: list[int]) -> np.ndarray:
        """Return the sums of the used rows of messages of pairs as they are in memory, guards included.

        Nobody need have checked the messages: if they are refused, nothing is written.
        """
        gathered = self.backend.array(messages.reshape(-1, 2))
        try:
            self.backend.ops.assemble(self._parts, gathered, used, float(WORLD))
        except IndexError:
            assert self._host.tobytes() == self._untouched, "something was written before the error"
        return self._written()

    def union(self, messages: np.ndarray) -> np.ndarray | None:
        """Return all indices in messages of indices, where the worker can take its values; None if a message is refused."""
        gathered = self.backend.array(messages.reshape(-1))
        indices = self.backend.ops.union(gathered, len(messages), 0, self.recorded.numel)
        if indices is None:
            return None
        residual = self.backend.ops.copy(self._worker.buckets[0].buffer)
        assert len(self.backend.ops.take_out(residual, indices)) == len(indices)
        return self.backend.numpy(indices)

    def _written(self) -> np.ndarray:
        """Return a copy of the memory, and forget what was written. The guards must be as before."""
        written = self._host.copy()
        for place in self._places:
            self._host[place] = SENTINEL
        assert self._host.tobytes() == self._untouched, "something was written beyond the parts"
        return written
