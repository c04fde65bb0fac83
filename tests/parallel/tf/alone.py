"""What needs a process of its own: a way of importing Horovod, or a worker that is alone.

python -m parallel.tf.alone CASE
"""

# ruff: noqa: I001  The order of the imports is what is tested.

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import tensorflow as tf


def _step(hvd: Any, distributed_tape: Any, compression: Any, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A gradient and what becomes of it."""
    weight = tf.Variable(tf.zeros((40, 30)), name="weight")
    gradient = np.random.default_rng((seed, hvd.rank())).normal(size=(40, 30)).astype(np.float32)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * gradient)
    (reduced,) = distributed_tape(tape, compression=compression).gradient(loss, [weight])
    return gradient, reduced.numpy()


def _trains(hvd: Any, distributed_tape: Any, compression: Any) -> None:
    hvd.init()
    for seed in range(3):
        _, reduced = _step(hvd, distributed_tape, compression, seed)
        assert 12 <= np.count_nonzero(reduced) <= 12 * hvd.size(), "every rank sends a hundredth of 1200 entries"
        gathered = hvd.allgather_object(reduced)
        assert all((one == reduced).all() for one in gathered)


def horovod_first() -> None:
    import horovod.tensorflow as hvd
    from horovod_sparse.tensorflow import TopK

    _trains(hvd, hvd.DistributedGradientTape, TopK(0.01, warmup=None))


def ours_first() -> None:
    from horovod_sparse.tensorflow import TopK
    import horovod.tensorflow as hvd

    _trains(hvd, hvd.DistributedGradientTape, TopK(0.01, warmup=None))


def ours_only() -> None:
    import horovod_sparse.tensorflow as hvd

    _trains(hvd, hvd.DistributedGradientTape, hvd.TopK(0.01, warmup=None))


def function_first() -> None:
    from horovod.tensorflow import DistributedGradientTape
    import horovod_sparse.tensorflow as hvd

    _trains(hvd, DistributedGradientTape, hvd.TopK(0.01, warmup=None))


def forced() -> None:
    import horovod_sparse.tensorflow as hvd

    hvd.init()
    gradient, reduced = _step(hvd, hvd.DistributedGradientTape, hvd.TopK(0.01, warmup=None), 0)
    largest = np.argsort(-np.abs(gradient).reshape(-1), kind="stable")[:12]
    expected = np.zeros(1200, np.float32)
    expected[largest] = gradient.reshape(-1)[largest]
    np.testing.assert_array_equal(reduced.reshape(-1), expected)


def plain() -> None:
    import horovod_sparse.tensorflow as hvd

    hvd.init()
    compression = hvd.TopK(0.01, warmup=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        gradient, reduced = _step(hvd, hvd.DistributedGradientTape, compression, 0)
        _step(hvd, hvd.DistributedGradientTape, compression, 1)
    texts = [str(warning.message) for warning in caught if "horovod_sparse" in str(warning.message)]
    assert len(texts) == 1 and "HOROVOD_SPARSE_FORCE=1" in texts[0], texts
    np.testing.assert_array_equal(reduced, gradient)
    assert compression.stats().steps == 0 and compression.residual_bytes == 0
    compression.load_state_dict(compression.state_dict())


CASES = {
    function.__name__: function for function in (horovod_first, ours_first, ours_only, function_first, forced, plain)
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
    print(f"{sys.argv[1]} works")
