"""PyTorch adapter: the compressors, for Horovod and for `torch.distributed`, and every name of ``horovod.torch``.

Importing it extends stock Horovod's optimizer (see `seam`), so ``import horovod.torch as hvd`` works just as well. Without
Horovod, the names that need it are not there.
"""

from typing import Any as _Any

from horovod_sparse.torch import stock

if stock.module is not None:
    from horovod.torch import *

from horovod_sparse.contrib.local_updates import LocalUpdates as LocalUpdates
from horovod_sparse.public import *
from horovod_sparse.torch.compressors import *
from horovod_sparse.torch.hook import comm_hook as comm_hook
from horovod_sparse.torch.hook import register as register

if stock.module is not None:
    from horovod_sparse.torch import seam

    seam.install()
    # The star import has brought it as it was before.
    DistributedOptimizer = stock.module.DistributedOptimizer

# Not our own modules.
__all__ = [name for name, one in globals().items() if name[0] != "_" and getattr(one, "__package__", "") != __name__]


def __getattr__(name: str) -> _Any:
    """Return any other name of Horovod's module, private names included."""
    if stock.module is None:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}: horovod.torch cannot be imported ({stock.missing}). With "
            "torch.distributed use comm_hook or register; for hvd.DistributedOptimizer install Horovod"
        )
    return getattr(stock.module, name)
