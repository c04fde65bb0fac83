"""Exchanges of several workers: nothing is lost, and all ranks get the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from driver import dense_sum, make_pipelines, take_step
from table import COMPRESSORS, ORACLE, Row
from worker import Worker

from horovod_sparse.exchange.protocols import Exchange
from horovod_sparse.public import Pairs, SharedIndices, Union

NUMEL, WORLD = 97, 4
SHAPES = {"a": (7, 5), "b": (62,)}
EXCHANGES: dict[str, Exchange] = {"pairs": Pairs(), "shared": SharedIndices(), "union": Union()}
CASES = [
    (name, row)
    for name, exchange in EXCHANGES.items()
    for row in COMPRESSORS
    if exchange.needs in row.cls.chooses and not ("exchange" in row.settings or row.momentum)
]


def flat(pipeline: Worker) -> np.ndarray:
    """A copy of the residual."""
    return ORACLE.numpy(pipeline.buckets[0].buffer).copy()


def step(pipelines: Sequence[Worker], gradients: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """One step of all ranks; every rank's reduced gradient, not divided, in the order of the bucket."""
    # The last parameter is the first in the bucket.
    given = [{"b": gradient[:62].copy(), "a": gradient[62:].reshape(7, 5).copy()} for gradient in gradients]
    results = take_step(ORACLE, pipelines, given)
    if results[0]["a"] is None:
        return None
    return [np.concatenate([dense_sum(one["b"], 62), dense_sum(one["a"], 35)]) for one in results]


def dyadic(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Gradients whose sums are exact in float32, in any order."""
    return [(np.round(rng.laplace(size=NUMEL) * 64) / 64).astype(np.float32) for _ in range(count)]


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
    pipelines = make_pipelines(ORACLE, compressor, SHAPES, WORLD, dtype=dtype)
    total = np.zeros(NUMEL)
    for number in range(6):
        gradients = [gradient.astype(dtype) for gradient in dyadic(rng, len(pipelines))]
        if number == 3:
            gradients[2][40] = np.nan
        before = [flat(pipeline) for pipeline in pipelines]
        results = step(pipelines, gradients)
        assert (results is None) == (number == 3)
        if results is None:
            for pipeline, old in zip(pipelines, before, strict=True):
                np.testing.assert_array_equal(flat(pipeline), old)
        else:
            assert all(result.tobytes() == results[0].tobytes() for result in results)
            total += np.sum(gradients, axis=0, dtype=np.float64) - results[0]
        residual = np.sum([flat(pipeline) for pipeline in pipelines], axis=0, dtype=np.float64)
        np.testing.assert_array_equal(residual, total)
