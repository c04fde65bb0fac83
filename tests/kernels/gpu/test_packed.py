"""Packed messages, made and read by Triton's kernels, interpreted on the CPU, in lockstep with their twins in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from horovod_sparse.exchange.wire import NOT_FINITE, PADDING
from horovod_sparse.kernels.gpu import packed
from horovod_sparse.numpy.ops import NumpyOps

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ORACLE = NumpyOps()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("numel", [9000, 4096, 50, 1])
def test_messages_are_packed_as_on_the_host(numel: int, dtype: Any) -> None:
    """Full and empty chunks, equal magnitudes, some that differ too much for a level, zeros, and no entries at all."""
    rng = np.random.default_rng(numel)
    for part, room in ((0.5, 17), (0.02, 0), (1.0, 3), (0.0, 1)):
        indices = np.flatnonzero(rng.uniform(size=numel) < part)
        x = (rng.choice([1.0, 1e-9, 1e9, 0.0], numel) * rng.laplace(size=numel).round(1)).astype(dtype)
        theirs, mine = x.copy(), torch.from_numpy(x.copy())
        pairs = ORACLE.take_pairs_out(theirs, indices, max(len(indices) + room, 1))
        mine[:] = torch.from_numpy(theirs)
        message = torch.from_numpy(pairs.copy())
        made, expected = packed.quantize(mine, message), ORACLE.quantize(theirs, pairs)
        np.testing.assert_array_equal(made.numpy(), expected)
        np.testing.assert_array_equal(message.numpy(), pairs)
        np.testing.assert_array_equal(mine.numpy(), theirs)
        gathered = np.stack([expected] * 4)
        header = gathered.view(np.int16)
        header[1, 0], header[2, 0], header[3, 0] = NOT_FINITE, -7, header[3, 0] + 32
        got = packed.unquantize(torch.from_numpy(gathered.reshape(-1)), 4, numel)
        np.testing.assert_array_equal(got.numpy(), ORACLE.unquantize(gathered.reshape(-1), 4, numel))
    nothing = torch.tensor([[NOT_FINITE, 0], [PADDING, 0]], dtype=torch.int32)
    expected = ORACLE.quantize(theirs, nothing.numpy().copy())
    np.testing.assert_array_equal(packed.quantize(mine, nothing).numpy(), expected)
