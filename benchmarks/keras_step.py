"""Time a batch of `fit` with Adam in Keras 3: gradients reduced in the optimizer, beside local updates. In turns.

    mpirun -np 2 python benchmarks/keras_step.py
    mpirun -np 2 python benchmarks/keras_step.py --width 512 --layers 4 --turns 5

In each turn every row calls `fit` once with its own model; a batch's time is that from the end of the first to the end of the
last, by their number. Prints one table; fails unless the workers' variables are the same in every row but the first. A unit is
the time of `residual += gradient` for as many entries as the model has, which all workers measure at once in every turn.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import machine
import markdown
import numpy as np
import tensorflow as tf
from horovod.tensorflow import allgather_object

import horovod_sparse.tensorflow.keras as hvd
from horovod_sparse.tensorflow.keras import LocalUpdates, SIDCo

Make = Callable[[Any], tuple[Any, list[Any]]]
"""Returns, of an optimizer, the one for `compile`, and callbacks."""
ALONE, DENSE = "no exchange", "dense fp32"
EVERY = 5


def sparse() -> Any:
    return SIDCo(0.01, warmup=None)


ROWS: dict[str, Make] = {
    ALONE: lambda optimizer: (optimizer, []),
    DENSE: lambda optimizer: (hvd.DistributedOptimizer(optimizer), []),
    "dense fp16": lambda optimizer: (hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16), []),
    "gradients, SIDCo 0.01": lambda optimizer: (hvd.DistributedOptimizer(optimizer, compression=sparse()), []),
    "local updates, SIDCo 0.01": lambda optimizer: (optimizer, [LocalUpdates(sparse())]),
    "local updates, SIDCo 0.01, ahead": lambda optimizer: (optimizer, [LocalUpdates(sparse(), ahead=0.5)]),
    f"local updates, SIDCo 0.01, every {EVERY}": lambda optimizer: (optimizer, [LocalUpdates(sparse(), every=EVERY)]),
}


class Watch(keras.callbacks.Callback):
    """Notes when batches end."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def build(make: Make, width: int, layers: int) -> tuple[Any, list[Any]]:
    """Return a compiled model, the same for every row, and its callbacks."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((width,)), *(keras.layers.Dense(width) for _ in range(layers))])
    optimizer, callbacks = make(keras.optimizers.Adam(1e-4))
    model.compile(optimizer, loss="mse", jit_compile=False)
    return model, callbacks


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--batches", type=int, default=4 * EVERY, help=f"of a turn, a multiple of {EVERY}")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    hvd.init()
    tf.config.set_visible_devices([], "GPU")
    rows = {name: build(make, args.width, args.layers) for name, make in ROWS.items()}
    numel = next(iter(rows.values()))[0].count_params()
    random = np.random.default_rng(hvd.rank())
    inputs = random.normal(size=(args.batches * args.batch_size, args.width)).astype(np.float32)
    times: dict[str, list[float]] = {name: [] for name in rows}
    units = []
    residual, gradient = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
    # In the first turn functions are traced.
    for turn in range(args.turns + 1):
        for name, (model, callbacks) in rows.items():
            watch = Watch()
            allgather_object(None)
            model.fit(
                inputs, inputs, batch_size=args.batch_size, shuffle=False, verbose=0, callbacks=[*callbacks, watch]
            )
            if turn:
                times[name].append((watch.ends[-1] - watch.ends[0]) / (args.batches - 1))
        allgather_object(None)
        began = time.perf_counter()
        residual += gradient
        units.append(time.perf_counter() - began)
    for name, (model, _) in rows.items():
        everyone = allgather_object([one.tobytes() for one in model.get_weights()])
        if name != ALONE and any(theirs != everyone[0] for theirs in everyone):
            raise RuntimeError(f"{name}: workers have different variables")
    if hvd.rank() == 0:
        medians = {name: 1000 * statistics.median(found) for name, found in times.items()}
        unit = 1000 * statistics.median(units)
        print(
            f"{numel:,} parameters, Adam, {hvd.size()} workers; {args.turns} turns of {args.batches} batches; "
            f"a unit is {unit:.2f} ms\n{machine.describe()}, Python {platform.python_version()}, TensorFlow {tf.__version__}\n"
        )
        found = [
            [name, f"{took:.1f}", f"{took - medians[ALONE]:.1f}", f"{(took - medians[ALONE]) / unit:.1f}"]
            for name, took in medians.items()
        ]
        print(markdown.table(["exchange", "batch, ms", "beyond computation, ms", "in units"], found))


if __name__ == "__main__":
    main()
