"""Keras adapter: every name of ``horovod.tensorflow.keras``, and the compressors.

Importing it extends stock Horovod, as `horovod_sparse.tensorflow` does. But Keras 3 optimizers without one of our
compressors must be made with the `DistributedOptimizer` of this package, because stock Horovod never reduces their gradients.
"""

import horovod.tensorflow.keras as _stock
from horovod.tensorflow.keras import *

from horovod_sparse.compressors.momentum import MomentumCorrection
from horovod_sparse.compressors.schedules import Schedule, warmup
from horovod_sparse.compressors.threshold import suggested_threshold
from horovod_sparse.core.averaging import WeightedAverage
from horovod_sparse.tensorflow.compressors import (
    DGC,
    GaussianK,
    MiCRO,
    NoOp,
    RandomBlock,
    RandomK,
    RedSync,
    SIDCo,
    Threshold,
    TopK,
)

# This also binds `callbacks` to our module; the star import has bound it to Horovod's.
from horovod_sparse.tensorflow.keras.callbacks import CompressionCheckpoint
from horovod_sparse.tensorflow.keras.wrappers import DistributedOptimizer, load_model
from horovod_sparse.tensorflow.wrappers import broadcast_variables

__all__ = [name for name in globals() if not name.startswith("_") and name not in ("optimizer", "wrappers")]


def __getattr__(name: str) -> object:
    """Return any other attribute of Horovod's module, private names too."""
    return getattr(_stock, name)
