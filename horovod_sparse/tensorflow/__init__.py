"""TensorFlow adapter: every name of ``horovod.tensorflow``, and the compressors.

Importing it extends stock Horovod (see `seam`), so ``import horovod.tensorflow as hvd`` works just as well.
"""

import importlib as _importlib
from typing import Any as _Any

import horovod.tensorflow as _stock
from horovod.tensorflow import *

# Type checkers export only names that are imported as themselves, or by a star.
from horovod_sparse.public import *
from horovod_sparse.tensorflow import seam
from horovod_sparse.tensorflow.compressors import *
from horovod_sparse.tensorflow.names import broadcast_variables as broadcast_variables

# The star import brings Horovod's `keras` if that was imported before. Ours appears once it is imported.
globals().pop("keras", None)

seam.install()
# The star import has brought it as it was before.
DistributedOptimizer = _stock.DistributedOptimizer

# Not our own modules.
__all__ = [name for name, one in globals().items() if name[0] != "_" and getattr(one, "__package__", "") != __name__]


def __getattr__(name: str) -> _Any:
    """Return any other name of Horovod's module, even a private one; `keras` is ours and is imported when asked for."""
    return _importlib.import_module(f"{__name__}.keras") if name == "keras" else getattr(_stock, name)
