"""Import the adapters of both frameworks in one process, and reduce with one of them: python -m parallel.both TRAINS LAST."""

# ruff: noqa: I001  The order of the imports is what is tested.

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import numpy as np

with suppress(ImportError):
    # PyTorch's wheels for GPUs bring it, and import it by and by. After TensorFlow, that ends the process.
    import triton  # noqa: F401


def _frameworks(last: str) -> dict[str, Any]:
    if last == "torch":
        import horovod_sparse.tensorflow as for_tensorflow
        import horovod_sparse.torch as for_torch
    else:
        import horovod_sparse.torch as for_torch
        import horovod_sparse.tensorflow as for_tensorflow
    return {"torch": for_torch, "tensorflow": for_tensorflow}


def _torch(hvd: Any) -> tuple[Any, np.ndarray]:
    import torch

    weight = torch.nn.Parameter(torch.zeros(20, 30))
    compression = hvd.TopK(1.0, min_numel=0, warmup=None)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("weight", weight)], compression=compression)
    (weight.sum() * (1.0 + hvd.rank())).backward()
    optimizer.step()
    return compression, -weight.detach().numpy()


def _tensorflow(hvd: Any) -> tuple[Any, np.ndarray]:
    import tensorflow as tf

    weight, compression = tf.Variable(tf.zeros((20, 30))), hvd.TopK(1.0, min_numel=0, warmup=None)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight) * (1.0 + hvd.rank())
    return compression, hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, weight).numpy()


REDUCE = {"torch": _torch, "tensorflow": _tensorflow}


def main(trains: str, last: str) -> None:
    hvd = _frameworks(last)["torch" if trains == "torch" else "tensorflow"]
    hvd.init()
    compression, reduced = REDUCE[trains](hvd)
    np.testing.assert_array_equal(reduced, np.full((20, 30), 1.5))
    assert compression.stats().steps == 1
    print(f"{trains} reduces", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
