"""RedSync, whose search ends within a band, is exact top-k in the end."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_sparse.compressors import RedSync, TopK
from tests.harness.table import KINDS, Backend, gradients, on_every_backend
from tests.harness.workers import make_worker, send


@on_every_backend
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [0.3, 0.01, 0.001])
def test_redsync_is_exact_top_k(backend: Backend, kind: str, ratio: float) -> None:
    rng = np.random.default_rng(0)
    trimmed, exact = (
        make_worker(backend, c, {"p": (5000,)}) for c in (RedSync(ratio, warmup=None), TopK(ratio, warmup=None))
    )
    for _ in range(5):
        gradient = gradients(kind, 5000, rng)
        got, expected = send(backend, trimmed, gradient), send(backend, exact, gradient)
        not_zero = expected.values != 0
        np.testing.assert_array_equal(got.indices, expected.indices[not_zero])
        np.testing.assert_array_equal(got.values, expected.values[not_zero])
