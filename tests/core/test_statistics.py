"""Statistics of the last step and their means: true, and printed as they are."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest

from horovod_sparse.compressors import SIDCo, Threshold, TopK
from tests.harness.table import ORACLE, Backend, gradients, on_every_backend
from tests.harness.workers import SHAPES, make_worker, send, step, worker_of


@pytest.mark.parametrize(("slack", "first"), [(60.0, 100), (1.0, 5)], ids=["some have no room", "most have no room"])
def test_truncation_that_lasts_is_said_once(slack: float, first: int) -> None:
    worker = make_worker(ORACLE, Threshold(0.1, ratio=0.01, slack=slack), {"p": (1000,)})
    rng = np.random.default_rng(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # These steps are forgotten with the other statistics.
        for _ in range(2):
            worker.reset()
            for _ in range(first - 1):
                send(ORACLE, worker, gradients("laplace", 1000, rng))
        assert not caught
        for _ in range(50):
            send(ORACLE, worker, gradients("laplace", 1000, rng))
    assert len(caught) == 1
    said = str(caught[0].message)
    assert re.search(rf"\b{first} steps .*'p'.* room for {10 * slack:g}\)", said) and "slack" in said


@on_every_backend
def test_statistics_are_true(backend: Backend) -> None:
    """Of each bucket: what it has sent is in `test_machine`, and how many bytes in `tests/tools/test_plan.py`."""
    worker = worker_of(backend, TopK(0.1, granularity="layer", slack=1.5, warmup=None))
    for seed in range(4):
        step(backend, worker, seed)
    stats = worker.stats()
    assert stats.steps == 4
    residual = np.concatenate([backend.numpy(r).reshape(-1) for r in worker.state_dict()["residuals"].values()])
    for snapshot in (stats.last, stats.mean):
        for one in snapshot.buckets:
            size = math.prod(SHAPES[one.name])
            assert (one.numel, one.target, one.ratio) == (size, size // 10, one.count / size) and one.count > 0
        for field in ("numel", "target", "count", "truncated", "bytes_sent"):
            assert getattr(snapshot.total, field) == sum(getattr(one, field) for one in snapshot.buckets)
        counted = replace(snapshot.buckets[0], bytes_sent=5.0)
        assert replace(snapshot, buckets=(counted, counted), dense_bytes_sent=7.0).bytes_sent == 17.0
        assert snapshot.total.residual_norm == pytest.approx(np.linalg.norm(residual), rel=1e-6)
    # What is printed: buckets and total with entries, target, sent, ratio, truncated, bytes.
    lines = [line.replace(",", "").split() for line in str(stats).splitlines()]
    assert lines[0][:4] == ["mean", "of", "4", "steps"]
    assert lines[1][:5] == ["bucket", "entries", "target", "sent", "ratio"]
    printed = {name: [float(number) for number in numbers] for name, *numbers in lines[2:-1]}
    for one in (*stats.mean.buckets, stats.mean.total):
        entries, target, sent, ratio, truncated, sent_bytes = printed.pop(one.name)
        assert ratio == pytest.approx(one.ratio, rel=0.005)
        known = [one.numel, one.target, one.count, one.truncated, one.bytes_sent]
        np.testing.assert_allclose([entries, target, sent, truncated, sent_bytes], known, atol=0.5, rtol=0)
    assert not printed


@on_every_backend
def test_overflow_is_counted_and_stays_in_the_residual(backend: Backend) -> None:
    """A one-stage fit of a light tail overestimates; the room ends at k."""
    compressor = SIDCo(0.01, stages=1, distribution="gpareto", slack=1.0, warmup=None)
    worker = make_worker(backend, compressor, {"p": (100_000,)})
    bucket = worker.buckets[0]
    gradient = gradients("gaussian", 100_000, np.random.default_rng(0))
    sent = send(backend, worker, gradient).indices
    total = worker.stats().last.total
    assert total.count == sent.size == 1000 and total.truncated > 100
    above = np.count_nonzero(np.abs(gradient) > np.float32(total.threshold))
    assert total.truncated == above - 1000
    assert np.count_nonzero(np.abs(backend.numpy(bucket.buffer)) > np.float32(total.threshold)) == total.truncated
