"""Reduce gradients alone. With HOROVOD_SPARSE_FORCE=1 they are compressed for real, without it nothing happens to them.

python -m parallel.tf.alone forced|plain
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np

import horovod_sparse.tensorflow as hvd

from .common import normals, reduce, selected, variables

GRADIENT = normals((40, 30), step=0, rank=0)


def _reduced(compression: Any) -> np.ndarray:
    return reduce(compression, variables({"weight": (40, 30)}), {"weight": GRADIENT})["weight"]


def forced() -> None:
    expected = selected(GRADIENT.reshape(-1), 12)
    np.testing.assert_array_equal(_reduced(hvd.TopK(0.01, warmup=None)).reshape(-1), expected)


def plain() -> None:
    compression = hvd.TopK(0.01, warmup=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            np.testing.assert_array_equal(_reduced(compression), GRADIENT)
    texts = [str(warning.message) for warning in caught if "horovod_sparse" in str(warning.message)]
    assert len(texts) == 1 and "HOROVOD_SPARSE_FORCE=1" in texts[0], texts
    assert compression.stats().steps == 0 and compression.residual_bytes == 0
    compression.load_state_dict(compression.state_dict())


if __name__ == "__main__":
    hvd.init()
    {"forced": forced, "plain": plain}[sys.argv[1]]()
    print(f"{sys.argv[1]} works")
