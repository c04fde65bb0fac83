"""Classify scikit-learn's bundled handwritten digits with a small CNN, data parallel, with compressed gradients.

    mpirun -np 2 python examples/tensorflow_digits.py --compression sidco --ratio 0.001
    horovodrun -np 2 python examples/tensorflow_digits.py --compression none

`torch_digits.py` in TensorFlow, with a gradient tape; `keras_digits.py` does it with `model.fit`. With more workers than idle
cores set OMP_NUM_THREADS=1 and TF_NUM_INTRAOP_THREADS=1, or the workers' threads fight for the cores.
"""

from __future__ import annotations

import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from common import RunLog, check_replicas, make_compression, make_parser, measure_traffic, optimizer_momentum
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import horovod_sparse.tensorflow as hvd

WARMUP_EPOCHS = 2

Examples = tuple[NDArray[np.float32], NDArray[np.int64]]


def load_data() -> tuple[Examples, Examples]:
    """Training and held-out images (N, 8, 8, 1) in 0..1 with their digit; the split is the same in every run."""
    images, digits = load_digits(return_X_y=True)
    x = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    train, held_out = train_test_split(np.arange(len(digits)), test_size=0.2, stratify=digits, random_state=0)
    return (x[train], digits[train]), (x[held_out], digits[held_out])


def make_batches(train: Examples, batch_size: int, seed: int) -> tf.data.Dataset:
    """This worker's batches, other ones in every epoch.

    The workers shuffle alike and each takes its own part of the images; all have the same number of whole batches, since a
    worker with one more would wait for the others for ever.
    """
    steps = len(train[0]) // hvd.size() // batch_size
    shuffled = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[0]), seed=seed)
    return shuffled.shard(hvd.size(), hvd.rank()).batch(batch_size, drop_remainder=True).take(steps)


def make_model() -> keras.Model:
    """151 thousand parameters."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def warm_up(lr: float, steps: int) -> keras.optimizers.schedules.LearningRateSchedule:
    """A learning rate that rises to `lr` in so many equal steps and stays there."""
    return keras.optimizers.schedules.PolynomialDecay(lr / steps, max(steps - 1, 1), end_learning_rate=lr)


def main() -> None:
    args = make_parser(__doc__.splitlines()[0], epochs=25, batch_size=16, lr=0.03, ratio=0.001).parse_args()
    hvd.init()
    # A model as small as this is for the CPU. In your own script give each worker its GPU:
    # gpus = tf.config.list_physical_devices("GPU"); tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    tf.config.set_visible_devices([], "GPU")
    keras.utils.set_random_seed(args.seed)

    train, (held_out_x, held_out_y) = load_data()
    batches = make_batches(train, args.batch_size, args.seed)

    model = make_model()
    # In your own script: compression = hvd.SIDCo(ratio=0.001).
    compression = make_compression(args, hvd)
    optimizer = keras.optimizers.SGD(
        warm_up(args.lr, WARMUP_EPOCHS * len(batches)), momentum=optimizer_momentum(compression, args)
    )
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    hvd.broadcast_variables([*model.weights, *optimizer.variables], root_rank=0)

    @tf.function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    log = RunLog(args.log_file, hvd)
    log.write("settings", **vars(args), workers=hvd.size(), parameters=model.count_params())
    started = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        losses, seconds = [], []
        for x, y in tqdm(batches, desc=f"epoch {epoch}/{args.epochs}", disable=hvd.rank() != 0, leave=False):
            step_started = time.perf_counter()
            losses.append(float(train_step(x, y)))
            seconds.append(time.perf_counter() - step_started)

        mean_loss = float(hvd.allreduce(tf.constant(statistics.fmean(losses)), name="mean_loss"))
        if hvd.rank() == 0:  # all workers hold the same parameters, so one evaluates for all
            named = np.argmax(model.predict_on_batch(held_out_x), axis=1)
            correct = float(np.mean(named == held_out_y))
            log.write_epoch(
                epoch,
                step=epoch * len(batches),
                loss=mean_loss,
                traffic=measure_traffic(compression, model.count_params(), hvd),
                seconds=seconds,
                text=f"accuracy {correct:.2%}",
                accuracy=correct,
            )

    parameters = {variable.path: variable.numpy() for variable in model.trainable_variables}
    agreed = check_replicas(parameters, hvd.allgather_object)
    log.write("end", seconds=time.perf_counter() - started, parameter_hash=agreed)


if __name__ == "__main__":
    main()
