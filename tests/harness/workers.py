"""Carries out the exchanges of several workers in this process: gathers by concatenation, sums in rank order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.contrib.lengths import sampled
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.layout import Parameter, Slot
from horovod_sparse.core.plan import layouts_of
from horovod_sparse.core.sending import Sending
from horovod_sparse.exchange import protocols, wire
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.numpy.virtual import results_of
from tests.harness.backend import Backend
from tests.harness.table import gradients_of
from tests.harness.worker import Worker


def make_worker(
    backend: Backend,
    compressor: Compressor,
    shapes: Mapping[str, Sequence[int]],
    *,
    world: int = 1,
    position: int = 0,
    dtype: str = "float32",
    averages: bool = True,
) -> Worker:
    """A worker with parameters of these shapes."""
    where: dict[str, Any] = {"world": world, "position": position, "rank": position}
    worker = backend.worker(backend.ops, compressor, averages=averages, **where)
    parameters = [Parameter(name, tuple(shape), dtype, "cpu") for name, shape in shapes.items()]
    like = backend.array(np.zeros(1, np.float32))
    worker.add_buckets(layouts_of(parameters, compressor), lambda name: like)
    return worker


def make_workers(
    backend: Backend, compressor: Compressor, shapes: Mapping[str, Sequence[int]], workers: int, **settings: Any
) -> list[Worker]:
    """Of so many workers."""
    where: dict[str, Any] = {"world": workers, **settings}
    return [make_worker(backend, compressor, shapes, position=position, **where) for position in range(workers)]


SHAPES = {"weight": (30, 40), "kernel": (500,), "head": (7, 11)}


def worker_of(backend: Backend, compressor: Compressor) -> Worker:
    """A worker alone, with parameters of these shapes."""
    return make_worker(backend, compressor, SHAPES)


def step(backend: Backend, worker: Worker, seed: int) -> None:
    """A step of such a worker, with gradients of this seed."""
    take_step(backend, [worker], [gradients_of(SHAPES, np.random.default_rng(seed))])


def collective(backend: Backend, requests: Sequence[Collective]) -> list[Any]:
    """What every rank gets of one collective; the ranks must have asked for the same."""
    messages = [backend.numpy(request.message) for request in requests]
    asked_for = [(one.kind, m.shape, m.dtype) for one, m in zip(requests, messages, strict=True)]
    assert len(set(asked_for)) == 1
    asked = [request._replace(message=message) for request, message in zip(requests, messages, strict=True)]
    return [backend.array(result) for result in results_of(asked)]


Reduced = dict[str, list[tuple[np.ndarray, np.ndarray]] | None]
"""Parameter name -> (indices, values) of each part, or None after a gradient that was not finite."""


def exchange(
    backend: Backend, workers: Sequence[Worker], buckets: Sequence[Bucket | Sending], divisor: float = 1.0
) -> list[Reduced]:
    """All ranks' exchange of one bucket; every rank's result. The step is not ended."""
    sendings = [worker.sending(bucket) for worker, bucket in zip(workers, buckets, strict=True)]
    following: list[Any] = [sending.begin() for sending in sendings]
    while following[0] is not None:
        answers = collective(backend, following)
        three = zip(workers, sendings, answers, strict=True)
        following = [worker.advance(sending, answer) for worker, sending, answer in three]
        assert len({one is None for one in following}) == 1
    reduced = [protocols.Reduced(one.ops, one.sent_by_all, divisor, one.rates) for one in sendings]
    return [reduced_of(backend, sending.layout.slots, one) for sending, one in zip(sendings, reduced, strict=True)]


def reduced_of(backend: Backend, slots: Sequence[Slot], reduced: protocols.Reduced) -> Reduced:
    """What is written of a bucket."""
    parts = _parts(backend, reduced.sent)
    if not parts:
        return {slot.name: None for slot in slots}
    # What adapters do with it. A float64 gradient's sum is float64 if everything was sent.
    dtype = backend.numpy(parts[0].values).dtype
    targets = [backend.ops.copy(backend.array(np.full(slot.numel, np.nan, dtype))) for slot in slots]
    reduced.write([(slot.offset, target) for slot, target in zip(slots, targets, strict=True)])
    result: Reduced = {}
    for slot, target in zip(slots, targets, strict=True):
        shared_by = reduced.divisor_at(slot.offset)
        shares = result[slot.name] = [_share(backend, slot, *entries, shared_by) for entries in parts]
        np.testing.assert_array_equal(backend.numpy(target), dense_sum(shares, slot.numel))
    return result


def end_step(worker: Worker) -> None:
    """End a step whose results `exchange` has returned."""
    worker.end_step(lambda slots, reduced: None)


def exchange_all(backend: Backend, workers: Sequence[Worker], divisor: float = 1.0) -> list[Reduced]:
    """All ranks' exchanges of all buckets, one after the other; every rank's result. The step is not ended."""
    results: list[Reduced] = [{} for _ in workers]
    for buckets in zip(*(worker.buckets for worker in workers), strict=True):
        for result, of_bucket in zip(results, exchange(backend, workers, buckets, divisor), strict=True):
            result |= of_bucket
    return results


def take_step(
    backend: Backend,
    workers: Sequence[Worker],
    gradients: Sequence[Mapping[str, np.ndarray | None]],
    rate: float | None = None,
) -> list[Reduced]:
    """One step of all workers, each with its own gradients; every rank's result."""
    for worker, given in zip(workers, gradients, strict=True):
        for name, gradient in given.items():
            worker.arrive(name, None if gradient is None else backend.array(gradient), rate)
    results = exchange_all(backend, workers)
    for worker in workers:
        end_step(worker)
    return results


class Sent(NamedTuple):
    """What came of one step of a single worker."""

    before: np.ndarray
    """What was selected from."""
    indices: np.ndarray
    values: np.ndarray


def _parts(backend: Backend, sent: protocols.Sent) -> list[protocols.Entries]:
    """What is added up, part by part; nothing if a gradient was not finite."""
    if not isinstance(sent, protocols.Messages):
        return [] if sent is None else [sent]
    pairs = zip(wire.split(sent.gathered, len(sent.used)), sent.used, strict=True)
    return [protocols.Entries(*backend.ops.unpack(message, rows)) for message, rows in pairs]


def _share(backend: Backend, slot: Slot, indices: Any, values: Any, divisor: float) -> tuple[np.ndarray, np.ndarray]:
    """A parameter's entries of a bucket's, counted from its own first."""
    host = backend.numpy(values)
    host = host / host.dtype.type(divisor)
    at = np.arange(host.size) if indices is None else backend.numpy(indices)
    inside = (at >= slot.offset) & (at < slot.offset + slot.numel)
    return at[inside] - slot.offset, host[inside]


def send(backend: Backend, worker: Worker, gradient: np.ndarray) -> Sent:
    """One step of a single worker with one parameter, "p"."""
    bucket = worker.arrive("p", backend.array(gradient))
    assert bucket is not None
    before = backend.numpy(bucket.buffer).copy()
    parts = exchange(backend, [worker], [bucket])[0]["p"]
    end_step(worker)
    assert parts is not None and len(parts) == 1
    return Sent(before, *parts[0])


def dense_sum(parts: list[tuple[np.ndarray, np.ndarray]] | None, size: int) -> np.ndarray:
    """The reduced gradient of a parameter."""
    assert parts is not None
    total = np.zeros(size, parts[0][1].dtype)
    for indices, values in parts:
        np.add.at(total, indices, values)
    return total


class ExactLengths:
    """What `Lengths` comes to, with more digits, and with the updates of all workers at hand.

    Args:
        sizes: of the arrays of an update.
        world: number of workers.
    """

    def __init__(self, sizes: Sequence[int], world: int) -> None:
        self.positions = sampled(sizes)
        self.world = world
        self.own: list[float] = []
        self.mean: list[float] = []

    def note(self, updates: Sequence[Sequence[np.ndarray]]) -> None:
        """Note a step, of which each worker has an update: flat arrays."""
        some = [np.concatenate([one[at] for one, at in zip(update, self.positions, strict=True)]) for update in updates]
        exact = np.array(some, np.float64)
        self.own.append(float((exact**2).sum(axis=1).mean()))
        self.mean.append(float((exact.mean(axis=0) ** 2).sum()))

    @property
    def factor(self) -> float:
        weights = 0.95 ** np.arange(len(self.own))[::-1]
        return float(np.sqrt(np.clip(weights @ self.own / (weights @ self.mean), 1.0, self.world))) if self.own else 1.0
