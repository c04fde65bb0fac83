"""Classify scikit-learn's bundled handwritten digits with a small CNN, data parallel, with compressed gradients.

    mpirun -np 2 python examples/keras_digits.py --compression sidco --ratio 0.001
    horovodrun -np 2 python examples/keras_digits.py --compression none
    mpirun -np 2 python examples/keras_digits.py --optimizer adam --lr 0.001 --local-updates --ratio 0.01

`tensorflow_digits.py` with `model.compile` and `model.fit` in place of the gradient tape. With more workers than idle cores
set OMP_NUM_THREADS=1 and TF_NUM_INTRAOP_THREADS=1, or the workers' threads fight for the cores.
"""

from __future__ import annotations

import time
from typing import Any

import keras
import tensorflow as tf
from common import RunLog, check_replicas, make_compression, make_parser, measure_traffic, optimizer_momentum
from horovod.tensorflow import allgather_object
from tensorflow_digits import WARMUP_EPOCHS, load_data, make_batches, make_model, warm_up

import horovod_sparse.tensorflow.keras as hvd


class Report(keras.callbacks.Callback):
    """Logs every epoch and prints it; stands behind what averages the loss over the workers."""

    def __init__(self, log: RunLog, compression: Any, parameters: int) -> None:
        super().__init__()
        self.log = log
        self.compression = compression
        self.parameters = parameters
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.seconds = []

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self.step_started = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self.seconds.append(time.perf_counter() - self.step_started)

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        if hvd.rank() == 0:
            self.log.write_epoch(
                epoch + 1,
                step=(epoch + 1) * len(self.seconds),
                loss=logs["loss"],
                traffic=measure_traffic(self.compression, self.parameters, hvd),
                seconds=self.seconds,
                text=f"accuracy {logs['val_accuracy']:.2%}",
                accuracy=logs["val_accuracy"],
                held_out_loss=logs["val_loss"],
            )


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0], epochs=25, batch_size=16, lr=0.03, ratio=0.001)
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument(
        "--local-updates", action="store_true", help="exchange movements in place of gradients: Adam's line"
    )
    args = parser.parse_args()
    hvd.init()
    # A model as small as this is for the CPU; `tensorflow_digits.py` says what your own script needs.
    tf.config.set_visible_devices([], "GPU")
    keras.utils.set_random_seed(args.seed)

    train, held_out = load_data()
    batches = make_batches(train, args.batch_size, args.seed)

    model = make_model()
    # In your own script: compression = hvd.SIDCo(ratio=0.001).
    compression = make_compression(args, hvd)
    rate = warm_up(args.lr, WARMUP_EPOCHS * len(batches))
    if args.optimizer == "adam":
        optimizer: keras.optimizers.Optimizer = keras.optimizers.Adam(rate)
    else:
        optimizer = keras.optimizers.SGD(rate, momentum=optimizer_momentum(compression, args))
    log = RunLog(args.log_file, hvd)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
        hvd.callbacks.MetricAverageCallback(),
        Report(log, compression, model.count_params()),
    ]
    if args.local_updates:
        hvd.broadcast_variables(model.weights, root_rank=0)
        callbacks[0] = hvd.LocalUpdates(compression)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # XLA cannot compile the exchange.
    )

    log.write("settings", **vars(args), workers=hvd.size(), parameters=model.count_params())
    started = time.perf_counter()
    model.fit(
        batches,
        epochs=args.epochs,
        verbose=0,
        shuffle=False,  # The batches come shuffled.
        validation_data=held_out,
        validation_batch_size=len(held_out[0]),
        callbacks=callbacks,
    )
    parameters = {variable.path: variable.numpy() for variable in model.trainable_variables}
    agreed = check_replicas(parameters, allgather_object)
    log.write("end", seconds=time.perf_counter() - started, parameter_hash=agreed)


if __name__ == "__main__":
    main()
