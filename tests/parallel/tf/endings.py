"""What a rank does in launches with TensorFlow that must end by themselves, with an error that says why.

python -m parallel.tf.endings CASE

In all cases a variable has its first gradient late, and on one rank only. The others are in several collectives of a step then.
"""

from __future__ import annotations

import sys

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_sparse.tensorflow import SIDCo

from .common import reduce, variables
from .tape import SHAPES, gradients_of


def beside_buckets() -> None:
    weights, compression = variables({**SHAPES, "late": (2000,)}), SIDCo(0.01, granularity="layer", warmup=None)
    for step in range(1000):
        gradients = gradients_of(step)
        if step >= 3 and hvd.rank() == 1:
            gradients["late"] = gradients["first"].reshape(-1)
        reduce(compression, weights, gradients)


def beside_an_embedding() -> None:
    table, late = tf.Variable(tf.ones((50, 4)), name="table"), tf.Variable(tf.ones(30), name="late")
    compression = SIDCo(0.01, warmup=None)
    for step in range(1000):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1, 5 + hvd.rank()]))
            if step >= 3 and hvd.rank() == 1:
                loss += tf.reduce_sum(late)
        hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [table, late])


CASES = {case.__name__: case for case in (beside_buckets, beside_an_embedding)}

if __name__ == "__main__":
    hvd.init()
    CASES[sys.argv[1]]()
    print("trained to the end")
