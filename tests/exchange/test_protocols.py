"""Exchanges of several workers: nothing is lost, and all ranks get the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from horovod_sparse.compressors import NoOp, RandomK, TopK
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.exchange.protocols import Exchange
from horovod_sparse.public import Pairs, SharedIndices, Union
from tests.harness.table import COMPRESSORS, ORACLE, Row
from tests.harness.worker import Worker
from tests.harness.workers import dense_sum, make_workers, take_step

NUMEL, WORLD = 97, 4
SHAPES = {"a": (7, 5), "b": (62,)}
EXCHANGES: dict[str, Exchange] = {"pairs": Pairs(), "shared": SharedIndices(), "union": Union()}
CASES = [
    (name, row)
    for name, exchange in EXCHANGES.items()
    for row in COMPRESSORS
    if exchange.needs in row.cls.chooses and not ("exchange" in row.settings or row.momentum)
]


def flat(worker: Worker) -> np.ndarray:
    """A copy of the residual."""
    return ORACLE.numpy(worker.buckets[0].buffer).copy()


def step(workers: Sequence[Worker], gradients: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """One step of all ranks; every rank's reduced gradient, not divided, in the order of the bucket."""
    # The last parameter is the first in the bucket.
    given = [{"b": gradient[:62].copy(), "a": gradient[62:].reshape(7, 5).copy()} for gradient in gradients]
    results = take_step(ORACLE, workers, given)
    if results[0]["a"] is None:
        return None
    return [np.concatenate([dense_sum(one["b"], 62), dense_sum(one["a"], 35)]) for one in results]


def dyadic(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Gradients whose sums are exact in float32, in any order."""
    return [(np.round(rng.laplace(size=NUMEL) * 64) / 64).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize(
    "compressor",
    [
        TopK(0.1, min_numel=0, warmup=None),
        TopK(0.1, min_numel=0, warmup=None, exchange=Pairs("packed")),
        TopK(0.1, min_numel=0, warmup=None, exchange=Union()),
        RandomK(0.1, min_numel=0, warmup=None),
        NoOp(min_numel=0),
    ],
    ids=lambda one: one.exchange.title,
)
def test_messages_are_as_long_as_was_said_before(compressor: Compressor) -> None:
    worker, *_ = make_workers(ORACLE, compressor, {"p": (NUMEL,)}, WORLD)
    (bucket,) = worker.buckets
    first, *_ = bucket.rounds_of(compressor.exchange)
    sending = worker.arrive("p", np.arange(NUMEL, dtype=np.float32))
    assert sending is not None
    collective = sending.begin()
    assert (collective.kind, collective.message.size) == (first.kind, first.length)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "row"), CASES, ids=str)
def test_sent_and_kept_are_what_came(name: str, row: Row, dtype: str) -> None:
    """A step whose gradient is not finite has never been."""
    rng = np.random.default_rng(3)
    compressor = row.make(
        0.1,
        min_numel=0,
        granularity="model",
        exchange=EXCHANGES[name],
        warmup=None,
    )
    workers = make_workers(ORACLE, compressor, SHAPES, WORLD, dtype=dtype)
    total = np.zeros(NUMEL)
    for number in range(6):
        gradients = [gradient.astype(dtype) for gradient in dyadic(rng, len(workers))]
        if number == 3:
            gradients[2][40] = np.nan
        before = [flat(worker) for worker in workers]
        results = step(workers, gradients)
        assert (results is None) == (number == 3)
        if results is None:
            for worker, old in zip(workers, before, strict=True):
                np.testing.assert_array_equal(flat(worker), old)
        else:
            assert all(result.tobytes() == results[0].tobytes() for result in results)
            total += np.sum(gradients, axis=0, dtype=np.float64) - results[0]
        residual = np.sum([flat(worker) for worker in workers], axis=0, dtype=np.float64)
        np.testing.assert_array_equal(residual, total)
