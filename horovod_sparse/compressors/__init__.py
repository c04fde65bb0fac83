"""The algorithms, framework-neutral: one small file each. `__all__` is the one list of them."""

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.dgc import DGC
from horovod_sparse.compressors.gaussiank import GaussianK
from horovod_sparse.compressors.micro import MiCRO
from horovod_sparse.compressors.noop import NoOp
from horovod_sparse.compressors.randomblock import RandomBlock
from horovod_sparse.compressors.randomk import RandomK
from horovod_sparse.compressors.redsync import RedSync
from horovod_sparse.compressors.sidco import SIDCo
from horovod_sparse.compressors.threshold import Threshold
from horovod_sparse.compressors.topk import TopK

__all__ = [
    "DGC",
    "GaussianK",
    "MiCRO",
    "NoOp",
    "RandomBlock",
    "RandomK",
    "RedSync",
    "SIDCo",
    "Threshold",
    "TopK",
]

COMPRESSORS: tuple[type[Compressor], ...] = tuple(globals()[name] for name in __all__)
