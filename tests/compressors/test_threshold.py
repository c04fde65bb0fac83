"""Threshold: what it leaves, in the unit of the residual."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_sparse.compressors import Threshold
from tests.harness.table import Backend, gradients, on_every_backend
from tests.harness.workers import make_worker, take_step


@on_every_backend
@pytest.mark.parametrize("rate", [None, 0.25])
def test_the_residual_stays_within_the_threshold(backend: Backend, rate: float | None) -> None:
    """Also where it holds updates, of a rate that changes nothing but the unit, and where it was rescaled."""
    compressor = Threshold(2.5, ratio=0.5, lr_in_residual=rate is not None)
    worker, rng, sent = make_worker(backend, compressor, {"p": (5000,)}), np.random.default_rng(9), 0.0
    for step in range(30):
        if step == 15:
            worker.rescale(4.0)
        (reduced,) = take_step(backend, [worker], [{"p": 2 * gradients("laplace", 5000, rng)}], rate)
        for _, values in reduced["p"] or ():
            assert np.abs(values).min() * (rate or 1.0) > 2.5
        assert np.abs(backend.numpy(worker.buckets[0].buffer)).max() <= 2.5 == worker.buckets[0].state.threshold
        sent += worker.stats().last.total.count
    assert sent > 1000
