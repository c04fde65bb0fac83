"""Threshold: what it leaves, and that it follows the unit of the residual."""

from __future__ import annotations

import numpy as np

from horovod_sparse.compressors import Threshold
from horovod_sparse.numpy.ops import NumpyOps
from tests.harness.table import Backend, gradients, on_every_backend
from tests.harness.workers import make_worker, send

OPS = NumpyOps()


# --- Threshold ---


@on_every_backend
def test_the_residual_stays_within_the_threshold(backend: Backend) -> None:
    worker = make_worker(backend, Threshold(2.5, ratio=0.5), {"p": (5000,)})
    rng = np.random.default_rng(9)
    for _ in range(30):
        sent = send(backend, worker, gradients("laplace", 5000, rng))
        assert np.abs(sent.values).min() > 2.5
        assert np.abs(backend.numpy(worker.buckets[0].buffer)).max() <= 2.5


def test_the_threshold_follows_the_unit_of_the_residual() -> None:
    compressor, x = Threshold(2.0, ratio=0.5), np.array([0.9, -1.1, 2.1, 3.9, -4.1], np.float32)
    state = compressor.new_state()
    for factor, expected in ((1.0, [2, 3, 4]), (2.0, [4]), (0.25, [1, 2, 3, 4])):
        state.rescale(factor)
        assert compressor.select(OPS, x, 2, 5, state).indices.tolist() == expected
        loaded = compressor.new_state()
        loaded.load_state_dict(state.state_dict())
        assert compressor.select(OPS, x, 2, 5, loaded).indices.tolist() == expected
