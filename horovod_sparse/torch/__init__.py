"""PyTorch adapter: every name of ``horovod.torch``, and the compressors.

Importing it extends stock Horovod's optimizer (see `seam`), so ``import horovod.torch as hvd`` works just as well.
"""

import horovod.torch as _stock
from horovod.torch import *

from horovod_sparse.core.checkpoint import Checkpoint as Checkpoint
from horovod_sparse.core.public import *
from horovod_sparse.torch import seam
from horovod_sparse.torch.checkpoint import load_checkpoint as load_checkpoint
from horovod_sparse.torch.checkpoint import save_checkpoint as save_checkpoint
from horovod_sparse.torch.compressors import *
from horovod_sparse.torch.uneven import Join as Join

seam.install()

__all__ = [name for name in globals() if not name.startswith("_") and name != "seam"]


def __getattr__(name: str) -> object:
    """Return any other name of Horovod's module, private names included."""
    return getattr(_stock, name)
