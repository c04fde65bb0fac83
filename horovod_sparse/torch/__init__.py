"""PyTorch adapter: every name of ``horovod.torch``, and the compressors.

Importing it extends stock Horovod's optimizer (see `seam`), so ``import horovod.torch as hvd`` works just as well.
"""

import horovod.torch as _stock
from horovod.torch import *

from horovod_sparse.compressors.momentum import MomentumCorrection
from horovod_sparse.compressors.schedules import Schedule, warmup
from horovod_sparse.compressors.threshold import suggested_threshold
from horovod_sparse.core.averaging import WeightedAverage
from horovod_sparse.torch import seam
from horovod_sparse.torch.compressors import (
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

seam.install()

__all__ = [name for name in globals() if not name.startswith("_") and name != "seam"]


def __getattr__(name: str) -> object:
    """Return any other name of Horovod's module, private names included."""
    return getattr(_stock, name)
