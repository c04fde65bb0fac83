"""A plugin of pytest for Keras' own tests: an optimizer is made distributed when it applies its first gradients.

Dense is Keras alone: stock Horovod leaves the gradients of Keras 3 as they are.
"""

from __future__ import annotations

from typing import Any

from keras.src.optimizers.base_optimizer import BaseOptimizer

from suites import outcomes


def _put_in() -> None:
    import horovod.tensorflow.keras as hvd

    from horovod_sparse.tensorflow import TopK

    hvd.init()
    stock = BaseOptimizer.apply

    def apply(self: Any, *given: Any, **named: Any) -> Any:
        if "apply" in vars(self):
            return stock(self, *given, **named)
        hvd.DistributedOptimizer(self, compression=TopK(1.0, min_numel=0, warmup=None))
        outcomes.note_use()
        return self.apply(*given, **named)

    BaseOptimizer.apply = apply


if outcomes.ours():
    _put_in()
