"""What workers have sent, recorded from real compressors, and the receiving side of a backend with guarded memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from driver import collective, make_pipelines, take_step
from table import ORACLE, Backend

from horovod_sparse import compressors
from horovod_sparse.compressors.base import Compressor, Place
from horovod_sparse.exchange.balanced import Balanced
from horovod_sparse.exchange.grid import Grid, grid
from horovod_sparse.exchange.hierarchical import Hierarchical
from horovod_sparse.exchange.pairs import Pairs
from horovod_sparse.exchange.protocols import Exchange, Reduced, Run
from horovod_sparse.exchange.union import Union
from horovod_sparse.ops.protocol import Selection

WORLD = 4
GUARD = 64
"""Elements around every array that is written to. They must not change."""
SENTINEL = -12345.0


CASES: dict[str, Compressor] = {
    "pairs": compressors.TopK(0.2, slack=1.3, warmup=None),
    "pairs, full": compressors.TopK(0.3, warmup=None),
    "pairs, one row": compressors.TopK(0.01, warmup=None),
    "pairs, estimated": compressors.SIDCo(0.2, warmup=None),
    "pairs, float64": compressors.TopK(0.2, slack=1.3, residual="float64", warmup=None),
    "pairs, packed": compressors.TopK(0.2, slack=1.3, exchange=Pairs("packed"), warmup=None),
    "sums of regions": compressors.TopK(0.2, slack=1.3, exchange=Balanced(), warmup=None),
    "pairs of hosts": compressors.TopK(0.2, slack=1.3, exchange=Hierarchical(), warmup=None),
    "pairs, drawn": compressors.RandomK(0.2, exchange=Pairs(), warmup=None),
    "indices": compressors.MiCRO(0.2, warmup=None),
    "indices, of all": compressors.TopK(0.2, slack=1.3, exchange=Union(), warmup=None),
    "values": compressors.RandomK(0.2, warmup=None),
    "values, blocks": compressors.RandomBlock(0.2, warmup=None),
    "dense": compressors.NoOp(),
    "dense, float64": compressors.NoOp(residual="float64"),
}
GROUPS = "aabb"
"""The host of each worker, where that matters."""
SIZES = (23, 1, 40)
"""Of the parameters of the bucket."""


@dataclass(frozen=True)
class Recorded:
    """What the workers have sent in one step, and what each was about to do next."""

    compressor: Compressor
    exchange: Exchange
    numel: int
    k: int
    capacity: int
    dtype: str
    buffers: list[np.ndarray]
    """Each worker's residual before the selection."""
    selected: list[np.ndarray]
    messages: list[np.ndarray]
    """The messages with what is added up, as the first worker gets them, or whose sum it takes."""
    received: list[np.ndarray]
    """What the first worker has got by alltoall before that."""
    bounds: list[int]
    checksums: list[int]
    proposals: list[float]


def record(compressor: Compressor) -> Recorded:
    """Let workers make a step, and the messages of the next."""
    rng = np.random.default_rng(5)
    shapes = {f"p{number}": (size,) for number, size in enumerate(SIZES)}
    compressor.min_numel, compressor.granularity = 0, "model"
    dtype = compressor.residual_dtype_of(np.zeros(0, np.float32))
    groups = compressor.exchange.hosts(WORLD, lambda host: GROUPS)
    pipelines = make_pipelines(ORACLE, compressor, shapes, WORLD, dtype=dtype, groups=groups)
    buckets = [pipeline.buckets[0] for pipeline in pipelines]
    first, second = (
        [{name: rng.laplace(size=shape).astype(dtype) for name, shape in shapes.items()} for _ in pipelines]
        for _ in range(2)
    )
    take_step(ORACLE, pipelines, first)
    for pipeline, given in zip(pipelines, second, strict=True):
        for name, gradient in given.items():
            pipeline.arrive(name, gradient)
    buffers = [bucket.buffer.copy() for bucket in buckets]
    selected = [bucket.select().indices for bucket in buckets]
    bounds = [*buckets[0].state.bounds]
    asked = [bucket.begin() for bucket in buckets]
    received = []
    # What an alltoall brings is seen by its receiver only. The last one of a host brings what is added up.
    between = [one for one in buckets[0].rounds_of(compressor.exchange) if one.kind == "alltoall"]
    of_hosts = len(between) > 1
    for _ in between[of_hosts:]:
        answers = collective(ORACLE, asked)
        received.append(answers[0].copy())
        asked = [bucket.advance(answer) for bucket, answer in zip(buckets, answers, strict=True)]
    messages = [one.message for one in asked]
    if of_hosts:
        messages = np.split(collective(ORACLE, asked)[0], WORLD)
    return Recorded(
        compressor,
        compressor.exchange,
        buckets[0].numel,
        buckets[0].k,
        buckets[0].capacity,
        dtype,
        buffers,
        selected,
        messages,
        received,
        bounds,
        [bucket.checksum() for bucket in buckets],
        [bucket.state.proposal for bucket in buckets],
    )


class Replay:
    """A `protocols.Sender` that sends again what one worker has sent. Its part of the bucket is the first worker's."""

    name = "p2"
    world = WORLD
    finite = True
    position = 0
    step = 1
    sparse_step = 1

    def __init__(self, recorded: Recorded, backend: Backend, rank: int) -> None:
        self.ops, self.rank = backend.ops, rank
        self.numel, self.capacity, self.k = recorded.numel, recorded.capacity, recorded.k
        self._recorded = recorded
        self._pristine = backend.array(recorded.buffers[rank])
        self._selected = backend.array(recorded.selected[rank])
        self.grid: Grid | None = grid(GROUPS, self.position)
        self.begin()

    def begin(self) -> None:
        """Go back to the beginning of the step."""
        self.buffer = self.ops.copy(self._pristine)
        self.state = self._recorded.compressor.new_state(Place(self.name, self.rank, WORLD))
        self.state.bounds = [*self._recorded.bounds]
        self.state.proposal = self._recorded.proposals[self.rank]

    def message(self) -> Any:
        return self.ops.pack(self._selected, self.take(self._selected), self.capacity)

    def finish(self) -> None: ...

    def select(self) -> Selection:
        return Selection(self._selected, len(self._selected))

    def select_from(self, x: Any, k: int, capacity: int) -> Selection:
        return self.ops.select_largest(x, min(k, capacity)) if k else Selection(self._selected[:0], 0)

    def capacity_for(self, numel: int, k: int) -> int:
        return self._recorded.compressor.message_capacity(numel, k, WORLD)

    def take(self, indices: Any) -> Any:
        return self.ops.take(self.buffer, indices)

    def take_all(self) -> Any:
        return self.buffer

    def drop_rest(self) -> None: ...

    def sent(self, count: int, truncated: int = 0, target: int | None = None) -> None:
        assert 0 <= count <= self.numel

    def checksum(self) -> int:
        return self._recorded.checksums[self.rank]

    def observe(self, count: int, proposed: list[float]) -> None:
        self._recorded.compressor.observe(self.state, count, self.k, proposed)


class Receiver:
    """One backend on one rank, with guarded memory for the reduced gradients.

    Args:
        backend: the backend.
        recorded: what was sent.
        rank: the rank as which it receives.
    """

    def __init__(self, backend: Backend, recorded: Recorded, rank: int) -> None:
        self.backend, self.recorded = backend, recorded
        self._sender = Replay(recorded, backend, rank)
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
        self._sender.begin()
        run = Run(self.recorded.exchange, self._sender)
        next(run.collectives)
        try:
            for result in results:
                run.collectives.send(self.backend.array(result))
        except StopIteration as end:
            sent = end.value
        except RuntimeError as error:
            assert self._host.tobytes() == self._untouched, "something was written before the error"
            return re.sub(r"^rank \d: ", "", str(error))
        # What the worker has learned must be something that can be saved and loaded.
        self._sender.state.load_state_dict(self._sender.state.state_dict())
        assert all(0 <= one < self.recorded.numel for some in run.masked or () for one in some.tolist())
        if sent is not None:
            Reduced(self.backend.ops, sent, float(WORLD), {}).write(self._parts)
        return None if sent is None else self._written()

    def rows_in_use(self, messages: np.ndarray) -> list[int | None]:
        """Return what the backend says of the indices of many messages, which may be pairs."""
        flat = self.backend.array(
            messages.reshape(-1, messages.shape[-1]) if messages.ndim == 3 else messages.reshape(-1)
        )
        indices = flat[:, 0] if messages.ndim == 3 else flat
        return list(self.backend.ops.rows_in_use(indices, len(messages), self.recorded.numel))

    def unpacked(self, messages: np.ndarray) -> np.ndarray:
        """Return the messages of pairs that many shorter ones stand for."""
        gathered, exchange = self.backend.array(messages.reshape(-1)), self.recorded.exchange
        assert isinstance(exchange, Pairs)
        pairs = exchange.unpacked(self.backend.ops, gathered, len(messages), self.recorded.numel)
        return self.backend.numpy(pairs).reshape(len(messages), -1, 2)

    def assemble(self, messages: np.ndarray, used: list[int]) -> np.ndarray:
        """Return the sums of the used rows of messages of pairs as they are in memory, guards included.

        Nobody need have checked the messages: if they are refused, nothing is written.
        """
        gathered = self.backend.array(messages.reshape(-1, 2))
        try:
            self.backend.ops.assembler(gathered, used, float(WORLD))(self._parts)
        except IndexError:
            assert self._host.tobytes() == self._untouched, "something was written before the error"
        return self._written()

    def union(self, messages: np.ndarray) -> np.ndarray | None:
        """Return all indices in messages of indices, where this rank can take its values; None if a message is refused."""
        gathered = self.backend.array(messages.reshape(-1))
        indices = self.backend.ops.union(gathered, len(messages), 0, self._sender.numel)
        if indices is None:
            return None
        self._sender.begin()
        assert len(self._sender.take(indices)) == len(indices)
        return self.backend.numpy(indices)

    def _written(self) -> np.ndarray:
        """Return a copy of the memory, and forget what was written. The guards must be as before."""
        written = self._host.copy()
        for place in self._places:
            self._host[place] = SENTINEL
        assert self._host.tobytes() == self._untouched, "something was written beyond the parts"
        return written
