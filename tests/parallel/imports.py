"""Reduce a little with adapters imported in one of several ways; each must reach the same extended optimizer or tape.

Alone, gradients are compressed with HOROVOD_SPARSE_FORCE=1; without it nothing happens to them.

python -m tests.parallel.imports FRAMEWORK CASE
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np

from .scenario import normals, selected, warned

CASES = {
    "horovod_first": ("horovod.{}", "horovod_sparse.{}"),
    "ours_first": ("horovod_sparse.{}", "horovod.{}"),
    "ours_only": ("horovod_sparse.{}",),
    "function_first": ("horovod.{}", "horovod_sparse.{}"),
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
    compresses = hvd.size() > 1 or os.environ.get("HOROVOD_SPARSE_FORCE") == "1"

    def train() -> None:
        reduce, memory = make(wrap, compression), np.zeros(1200, np.float32)
        for step in range(3):
            gradient = normals((40, 30), step=step, rank=hvd.rank())
            reduced = reduce(gradient)
            memory += gradient.reshape(-1)
            sent = selected(memory, 12 if compresses else memory.size)
            memory -= sent
            mean = sum(one / hvd.size() for one in hvd.allgather_object(sent))
            np.testing.assert_array_equal(reduced.reshape(-1), mean)

    texts = warned(train)
    assert len(texts) == (not compresses) and all("HOROVOD_SPARSE_FORCE=1" in text for text in texts), texts
    assert compression.stats().steps == (3 if compresses else 0)
    assert compresses == (compression.residual_bytes > 0)
    compression.load_state_dict(compression.state_dict())
    print(f"{case} works", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
