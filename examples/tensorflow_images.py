"""Train an image classifier in a loop of your own with a gradient tape, data parallel, with compressed gradients.

    mpirun -np 2 python examples/tensorflow_images.py --data FOLDER --compression sidco --ratio 0.01
    mpirun -np 2 python examples/tensorflow_images.py --synthetic --epochs 1

FOLDER has train/ and val/, which have a folder of images for every class. docs/libraries.md says more.
"""

from __future__ import annotations

import pickle
import statistics
import time
from itertools import islice
from typing import Any

import keras
import tensorflow as tf
from common import check_replicas, make_compression, measure_traffic, optimizer_momentum
from images import (
    add_image_options,
    count_trainable,
    held_out_batches,
    learning_rate,
    load_images,
    make_model,
    steps_of_epoch,
    train_batches,
)
from jobs import make_course, make_job_parser, print_closing_table, resume, save, start_log

import horovod_sparse.tensorflow as hvd


class State(tf.train.experimental.PythonState):
    """The state of a compressor in a `tf.train.Checkpoint`; the dense exchanges have none."""

    def __init__(self, compression: Any) -> None:
        self.compression = compression

    def serialize(self) -> bytes:
        return pickle.dumps(self.compression.state_dict() if hasattr(self.compression, "stats") else None)

    def deserialize(self, string_value: bytes) -> None:
        state = pickle.loads(string_value)
        if state is not None:
            self.compression.load_state_dict(state)


def main() -> None:
    parser = make_job_parser(
        __doc__.splitlines()[0], data="folder with train/ and val/", epochs=90, batch_size=32, lr=0.1, ratio=0.01
    )
    add_image_options(parser)
    args = parser.parse_args()
    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(gpus[hvd.local_rank() : hvd.local_rank() + 1], "GPU")
    keras.utils.set_random_seed(args.seed)
    if args.bfloat16:
        keras.mixed_precision.set_global_policy("mixed_bfloat16")

    train, held_out, classes = load_images(args)
    course = make_course(args, steps_of_epoch(train, args, hvd))
    model = make_model(args, classes, train.size)
    # In your own script: compression = hvd.SIDCo(ratio=0.01). Make it once: tapes come and go.
    compression = make_compression(args, hvd)
    optimizer = keras.optimizers.SGD(
        learning_rate(args, course.epoch_steps), momentum=optimizer_momentum(compression, args)
    )
    # Loading and broadcasting need the optimizer's variables.
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.weights, *optimizer.variables], root_rank=0)
    kept = tf.train.Checkpoint(model=model, optimizer=optimizer, compression=State(compression))
    step = resume(args, hvd, lambda path: kept.read(str(path)).assert_consumed())

    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def count_correct(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.cast(tf.argmax(model(x, training=False), axis=1) == y, tf.float32))

    numel = count_trainable(model)
    log = start_log(args, hvd, numel)
    started = time.perf_counter()
    while step < course.last:
        epoch, done = divmod(step, course.epoch_steps)
        losses, seconds = [], []
        for x, y in islice(train_batches(train, args, hvd, epoch, done), course.last - step):
            step_started = time.perf_counter()
            losses.append(float(train_step(x, y)))
            seconds.append(time.perf_counter() - step_started)
            step += 1
            if args.checkpoint_dir and course.saves(step):
                save(args, hvd, step, lambda path: kept.write(str(path)))

        # Every worker looks at its own part of the held-out images.
        correct = sum(count_correct(x, y) for x, y in held_out_batches(held_out, args, hvd))
        correct = float(hvd.allreduce(tf.constant(correct, tf.float32), op=hvd.Sum, name="correct"))
        mean_loss = float(hvd.allreduce(tf.constant(statistics.fmean(losses)), name="mean_loss"))
        if hvd.rank() == 0:
            accuracy = correct / len(held_out)
            log.write_epoch(
                epoch + 1,
                step=step,
                loss=mean_loss,
                traffic=measure_traffic(compression, numel, hvd),
                seconds=seconds,
                text=f"accuracy {accuracy:.2%}",
                accuracy=accuracy,
            )

    parameters = {variable.path: variable.numpy() for variable in model.trainable_variables}
    agreed = check_replicas(parameters, hvd.allgather_object)
    log.write("end", seconds=time.perf_counter() - started, parameter_hash=agreed)
    print_closing_table(args, log, hvd, numel)


if __name__ == "__main__":
    main()
