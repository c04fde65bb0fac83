"""What a rank does in launches with TensorFlow that must end by themselves, with an error that says why.

python -m tests.parallel.tf.endings CASE

`beside_...`: a variable has its first gradient late, and on one rank only. The others are in several collectives of a step
then. `in_fit`: a rank raises, and the others wait for its local updates.
"""

from __future__ import annotations

import sys

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_sparse.tensorflow import SIDCo
from horovod_sparse.tensorflow.keras import LocalUpdates

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


def in_fit() -> None:
    def raise_on_one(batch: int, logs: object) -> None:
        if batch == 3 and hvd.rank() == 1:
            raise LookupError("rank 1 has enough")

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("adam", "mse")
    more = keras.callbacks.LambdaCallback(on_train_batch_end=raise_on_one)
    model.fit(
        tf.ones((1000, 4)), tf.ones((1000, 1)), batch_size=1, verbose=0, callbacks=[LocalUpdates(SIDCo(0.1)), more]
    )


CASES = {case.__name__: case for case in (beside_buckets, beside_an_embedding, in_fit)}

if __name__ == "__main__":
    hvd.init()
    CASES[sys.argv[1]]()
    print("trained to the end")
