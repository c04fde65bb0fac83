"""A training with TensorFlow in which one rank raises, exits or is killed at a chosen moment. It never ends well.

python -m tests.parallel.tf.faults MOMENT ACTION FOLDER
"""

from __future__ import annotations

import sys

import horovod.tensorflow as hvd
import keras

from horovod_sparse.kernels.ops import KernelOps
from horovod_sparse.tensorflow import SIDCo
from horovod_sparse.tensorflow.exchange import Collectives

from ..injected import FAULTY_STEP, STEPS, VICTIM, Fault, before
from .common import normals, reduce, variables

SHAPES = {"first": (40, 50), "second": (3000,), "third": (20, 5, 9)}


def main(fault: Fault) -> None:
    weights = variables(SHAPES)
    compression = SIDCo(0.01, granularity="layer", warmup=None)
    optimizer = keras.optimizers.SGD(0.1)
    if fault.moment == "exchange":
        before(KernelOps, "take_pairs_out", fault.happen)
    elif fault.moment == "agreement":
        before(Collectives, "agree", fault.happen)
    for step in range(STEPS):
        fault.armed = hvd.rank() == VICTIM and step == (0 if fault.moment == "agreement" else FAULTY_STEP)
        gradients = {name: normals(shape, step=step, rank=hvd.rank()) for name, shape in SHAPES.items()}
        reduced = reduce(compression, weights, gradients)
        if fault.moment == "optimizer":
            fault.happen()
        optimizer.apply([reduced[name] for name in weights], list(weights.values()))
    print("trained to the end")


if __name__ == "__main__":
    hvd.init()
    main(Fault(sys.argv[1], sys.argv[2], "tensorflow"))
