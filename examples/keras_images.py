"""Train an image classifier with Keras' `fit`, callbacks and resume, data parallel, with compressed gradients.

    mpirun -np 2 python examples/keras_images.py --data FOLDER --compression sidco --ratio 0.01
    mpirun -np 2 python examples/keras_images.py --synthetic --epochs 1

FOLDER has train/ and val/, which have a folder of images for every class. docs/libraries.md says more.
"""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from common import check_replicas, make_compression, optimizer_momentum
from horovod.tensorflow import allgather_object
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
from jobs import make_course, make_job_parser, print_closing_table, start_log
from keras_digits import Report

import horovod_sparse.tensorflow.keras as hvd


class TellEpoch(keras.callbacks.Callback):
    """Tells the data which epoch begins, so that a run that is resumed reads what it would have read."""

    def __init__(self, epoch: tf.Variable) -> None:
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.epoch.assign(epoch)


class Backup(keras.callbacks.BackupAndRestore):
    """Rank 0 saves the model and its optimizer for all, and every rank its residuals; the dense exchanges have none."""

    def __init__(self, folder: Path, compression: Any) -> None:
        super().__init__(str(folder / "backup"), delete_checkpoint=False)
        self.folder, self.compression = folder, compression

    def own_file(self) -> Path:
        return self.folder / f"residuals-{int(self.model.optimizer.iterations)}-{hvd.rank()}.pickle"

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        if int(self.model.optimizer.iterations) and hasattr(self.compression, "stats"):
            self.compression.load_state_dict(pickle.loads(self.own_file().read_bytes()))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if hasattr(self.compression, "stats"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.own_file().write_bytes(pickle.dumps(self.compression.state_dict()))
        # Rank 0 begins when all files are complete.
        allgather_object(None)
        if hvd.rank() == 0:
            super().on_epoch_end(epoch, logs)


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
    epoch = tf.Variable(0)
    model = make_model(args, classes, train.size)
    # In your own script: compression = hvd.SIDCo(ratio=0.01).
    compression = make_compression(args, hvd)
    optimizer = keras.optimizers.SGD(
        learning_rate(args, course.epoch_steps), momentum=optimizer_momentum(compression, args)
    )
    model.compile(
        hvd.DistributedOptimizer(optimizer, compression=compression),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # XLA cannot compile the exchange.
    )

    numel = count_trainable(model)
    log = start_log(args, hvd, numel)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
        hvd.callbacks.MetricAverageCallback(),
        TellEpoch(epoch),
        Report(log, compression, numel),
    ]
    if args.checkpoint_dir:
        # It saves when an epoch ends, and resumes by itself.
        callbacks.append(Backup(args.checkpoint_dir, compression))
    started = time.perf_counter()
    model.fit(
        train_batches(train, args, hvd, epoch),
        # `fit` pauses at the end of an epoch.
        epochs=-(-course.last // course.epoch_steps),
        verbose=0,
        shuffle=False,  # The batches come shuffled.
        validation_data=held_out_batches(held_out, args, hvd),
        callbacks=callbacks,
    )
    parameters = {variable.path: variable.numpy() for variable in model.trainable_variables}
    agreed = check_replicas(parameters, allgather_object)
    log.write("end", seconds=time.perf_counter() - started, parameter_hash=agreed)
    print_closing_table(args, log, hvd, numel)


if __name__ == "__main__":
    main()
