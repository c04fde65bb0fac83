"""Reduce a little with Horovod imported in one of several ways; each must reach the same extended optimizer or tape.

python -m parallel.imports FRAMEWORK CASE
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

CASES = {
    "horovod_first": (("horovod", "horovod_sparse"), "horovod"),
    "ours_first": (("horovod_sparse", "horovod"), "horovod"),
    "ours_only": (("horovod_sparse",), "horovod_sparse"),
    "function_first": (("horovod", "horovod_sparse"), "horovod"),
}
"""The packages whose adapters are imported, in this order, and the one that is used."""


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
    order, used = CASES[case]
    modules = {}
    for package in order:
        modules[package] = import_module(f"{package}.{framework}")
        if package == order[0]:
            early = getattr(modules[package], function)
    hvd = modules[used]
    wrap = early if case == "function_first" else getattr(hvd, function)
    hvd.init()
    compression = modules["horovod_sparse"].TopK(0.01, granularity="layer", warmup=None)
    reduce = make(wrap, compression)
    for step in range(3):
        reduced = reduce(np.random.default_rng(step).normal(size=(40, 30)).astype(np.float32))
        assert np.count_nonzero(reduced) == 12, "a hundredth of 1200 entries is sent"
    print(f"{case} works")


if __name__ == "__main__":
    main(*sys.argv[1:])
