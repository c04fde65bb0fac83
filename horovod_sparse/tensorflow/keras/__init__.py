"""Keras adapter: every public name of ``horovod.tensorflow.keras``, and the compressors.

Importing it extends stock Horovod, as `horovod_sparse.tensorflow` does; but Keras 3 optimizers without one of our
compressors must be made with the `DistributedOptimizer` of this package: stock Horovod never reduces their gradients.
"""

from horovod.tensorflow.keras import *

# The star has brought Horovod's module of this name.
import horovod_sparse.tensorflow.keras.callbacks as callbacks
from horovod_sparse.averaging import WeightedAverage
from horovod_sparse.compressors.threshold import suggested_threshold
from horovod_sparse.feedback import MomentumCorrection
from horovod_sparse.schedules import Schedule, warmup
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
from horovod_sparse.tensorflow.functions import broadcast_variables
from horovod_sparse.tensorflow.keras.functions import DistributedOptimizer, load_model

__all__ = [name for name in globals() if not name.startswith("_") and name not in ("functions", "optimizer")]
