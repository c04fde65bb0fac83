"""Reduce a little with adapters imported in one of several ways; each must reach the same extended optimizer or tape.

python -m parallel.imports FRAMEWORK CASE
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np

CASES = {
    "horovod_first": ("horovod.{}", "horovod_sparse.{}"),
    "ours_first": ("horovod_sparse.{}", "horovod.{}"),
    "ours_only": ("horovod_sparse.{}",),
    "function_first": ("horovod.{}", "horovod_sparse.{}"),
    "torch_last": ("horovod_sparse.tensorflow", "horovod_sparse.torch"),
    "tensorflow_last": ("horovod_sparse.torch", "horovod_sparse.tensorflow"),
}
"""The modules that are imported, in this order. Horovod's is used where it is one of them."""


def _torch(wrap: Any, compression: Any) -> Callable[[np.ndarray], np.ndarray]:
    import torch

    weight = torch.nn.Parameter(torch.zeros(40, 30))
    optimizer = wrap(torch.optim.SGD([weight], lr=0.1), [("weight", weight)], compression=compression)

    def reduced(gradient: np.ndarray) -> np.ndarray:
        optimizer.zero_grad(set_to_none=True)
        (weight * torch.from_numpy(gradient)).sum().backward()
        optimizer.step()
        return weight.grad.numpy()

    return reduced


def _tensorflow(wrap: Any, compression: Any) -> Callable[[np.ndarray], np.ndarray]:
    import tensorflow as tf

    weight = tf.Variable(tf.zeros((40, 30)), name="weight")

    def reduced(gradient: np.ndarray) -> np.ndarray:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * gradient)
        return wrap(tape, compression=compression).gradient(loss, [weight])[0].numpy()

    return reduced


FRAMEWORKS = {"torch": ("DistributedOptimizer", _torch), "tensorflow": ("DistributedGradientTape", _tensorflow)}


def main(framework: str, case: str) -> None:
    function, make = FRAMEWORKS[framework]
    stock, ours = f"horovod.{framework}", f"horovod_sparse.{framework}"
    names = [name.format(framework) for name in CASES[case]]
    if case.endswith("last"):
        with suppress(ImportError):
            # PyTorch's wheels for GPUs bring it, and import it by and by. After TensorFlow, that ends the process.
            import_module("triton")
    early = getattr(import_module(names[0]), function, None)
    modules = {name: import_module(name) for name in names}
    hvd = modules[stock if stock in modules else ours]
    wrap = early if case == "function_first" else getattr(hvd, function)
    hvd.init()
    compression = modules[ours].TopK(0.01, granularity="layer", warmup=None)
    reduce = make(wrap, compression)
    for step in range(3):
        reduced = reduce(np.random.default_rng((step, hvd.rank())).normal(size=(40, 30)).astype(np.float32))
        assert 12 <= np.count_nonzero(reduced) <= 12 * hvd.size(), "every rank sends a hundredth of 1200 entries"
        assert all((one == reduced).all() for one in hvd.allgather_object(reduced))
    assert compression.stats().steps == 3
    print(f"{case} works", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
