"""The weighted average of iterates."""

from __future__ import annotations

import numpy as np
import pytest
from table import WITH_OPERATIONS, Backend

from horovod_sparse.core.averaging import WeightedAverage


@pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
@pytest.mark.parametrize("shift", [1.0, 3.7, 200.0])
def test_streaming_equals_the_whole_sum(backend: Backend, shift: float) -> None:
    rng = np.random.default_rng(0)
    iterates = rng.normal(size=(40, 5))
    average = WeightedAverage(shift)
    for number, iterate in enumerate(iterates, start=1):
        given = backend.array(iterate)
        average.update([given])
        given[:] = 0  # The iterate is not kept.
        weights = (shift + np.arange(number)) ** 2
        expected = (weights[:, None] * iterates[:number]).sum(0) / weights.sum()
        np.testing.assert_allclose(backend.numpy(average.arrays[0]), expected, rtol=1e-10)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="shift must be > 0, got 0"):
        WeightedAverage(0)
