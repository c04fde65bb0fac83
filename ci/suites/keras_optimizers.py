"""A plugin of pytest for Keras' own tests: every optimizer is distributed as soon as it is made.

Dense is Keras alone: stock Horovod leaves the gradients of Keras 3 as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from suites import outcomes

_OF_OTHERS = ("LossScaleOptimizer", "MultiOptimizer")
"""Optimizers that apply the gradients by others, which are distributed."""


def _put_in(kind: Any) -> None:
    import horovod.tensorflow.keras as hvd

    from horovod_sparse.tensorflow import TopK

    made = kind.__init__

    # Keras looks at the names of the arguments.
    @functools.wraps(made)
    def make(self: Any, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        if type(self) is kind:
            hvd.DistributedOptimizer(self, compression=TopK(1.0, min_numel=0, warmup=None))
            outcomes.note_use()

    kind.__init__ = make


if outcomes.ours():
    import horovod.tensorflow as _horovod

    _horovod.init()
    for _kind in vars(keras.optimizers).values():
        _is_optimizer = isinstance(_kind, type) and issubclass(_kind, keras.optimizers.Optimizer)
        if _is_optimizer and _kind.__name__ not in (*_OF_OTHERS, "Optimizer"):
            _put_in(_kind)
