"""What all ranks must have alike so that values can be sent without indices."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_sparse.compressors import SIDCo
from tests.harness.table import Backend, on_every_backend
from tests.harness.workers import make_workers, take_step


@on_every_backend
def test_a_dense_step_compares_the_step_alone(backend: Backend) -> None:
    """Workers that have been in sparse steps begin a dense one if more join them: each has a state of its own."""
    workers = make_workers(backend, SIDCo(0.1, warmup=2.0), {"p": (1000,)}, workers=3)
    given, buckets = 3 * [{"p": np.ones(1000, np.float32)}], [worker.buckets[0] for worker in workers]
    for rank, bucket in enumerate(buckets):
        bucket.state.cut = 1.0 + rank
    take_step(backend, workers, given)
    assert all(bucket.stage.is_dense for bucket in buckets)
    buckets[1].state.step += 1
    with pytest.raises(RuntimeError, match=r"^rank 0: .* bucket 'p'"):
        take_step(backend, workers, given)
