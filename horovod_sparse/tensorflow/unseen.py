"""Warns of Keras optimizers that step with gradients of a sparse tape, which does not see them."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from horovod_sparse.core.agreement import DIVIDING, warn_unseen
from horovod_sparse.tensorflow.reducer import unmet

_INSTEAD = (
    "give the optimizer to hvd.DistributedOptimizer(optimizer, compression=...) in place of the tape or, where only its "
    "momentum matters, give the compressor momentum=0.9 and the optimizer none"
)


def settings_in(optimizer: Any) -> dict[str, Any]:
    """Return the settings of a Keras optimizer that tell how it uses gradients, by name."""
    return {name: getattr(optimizer, name) for name in ("momentum", *DIVIDING) if hasattr(optimizer, name)}


@functools.cache
def watch_optimizers() -> None:
    """Look at the variables of every `Optimizer.apply` of Keras 3 from now on. A second call does nothing."""
    import keras

    stock = keras.optimizers.Optimizer.apply

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        # The `apply` of an optimizer that is distributed is its own.
        if unmet and "apply" not in vars(self):
            variables = trainable_variables or self._trainable_variables
            for reducer in [one for one in unmet if one.names.know(variables)]:
                unmet.discard(reducer)
                warn_unseen(reducer.compressor, type(self).__name__, [settings_in(self)], _INSTEAD)
        stock(self, grads, trainable_variables)

    keras.optimizers.Optimizer.apply = tf.autograph.experimental.do_not_convert(apply)
