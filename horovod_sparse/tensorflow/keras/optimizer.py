"""Keras 3 optimizers that reduce their gradients before they apply them."""

from __future__ import annotations

from typing import Any

import keras


def is_keras_3(optimizer: Any) -> bool:
    """Whether stock Horovod would train this optimizer's replicas apart."""
    return isinstance(optimizer, keras.optimizers.Optimizer) and hasattr(optimizer, "apply")


def make(**arguments: Any) -> Any:
    """A distributed optimizer."""
    raise NotImplementedError("Keras 3 optimizers are not supported yet; use hvd.DistributedGradientTape")
