"""Keras adapter: every name of ``horovod.tensorflow.keras``, and the compressors.

Importing it extends stock Horovod, as `horovod_sparse.tensorflow` does. But Keras 3 optimizers without one of our
compressors must be made with the `DistributedOptimizer` of this package, because stock Horovod never reduces their gradients.
"""

from typing import Any as _Any

import horovod.tensorflow.keras as _stock
from horovod.tensorflow.keras import *

# Type checkers export only names that are imported as themselves, or by a star.
from horovod_sparse.core.checkpoint import Checkpoint as Checkpoint
from horovod_sparse.public import *
from horovod_sparse.tensorflow.checkpoint import load_checkpoint as load_checkpoint
from horovod_sparse.tensorflow.checkpoint import save_checkpoint as save_checkpoint
from horovod_sparse.tensorflow.compressors import *

# This also binds `callbacks` to our module; the star import has bound it to Horovod's.
from horovod_sparse.tensorflow.keras.callbacks import CheckpointCallback as CheckpointCallback
from horovod_sparse.tensorflow.keras.wrappers import DistributedOptimizer as DistributedOptimizer
from horovod_sparse.tensorflow.keras.wrappers import load_model as load_model
from horovod_sparse.tensorflow.wrappers import broadcast_variables as broadcast_variables

_OWN_MODULES = ("loss_scaling", "optimizer", "wrappers")

__all__ = [name for name in globals() if not name.startswith("_") and name not in _OWN_MODULES]


def __getattr__(name: str) -> _Any:
    """Return any other attribute of Horovod's module, private names too."""
    return getattr(_stock, name)
