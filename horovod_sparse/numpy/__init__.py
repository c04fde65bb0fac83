"""NumPy adapter: the compressors on arrays, over an mpi4py communicator, for people without a deep-learning framework.

The other frameworks are tested against its array verbs. It does not import MPI: the communicator is passed in.
"""

from horovod_sparse.compressors.dgc import DGC
from horovod_sparse.compressors.gaussiank import GaussianK
from horovod_sparse.compressors.micro import MiCRO
from horovod_sparse.compressors.momentum import MomentumCorrection
from horovod_sparse.compressors.noop import NoOp
from horovod_sparse.compressors.randomblock import RandomBlock
from horovod_sparse.compressors.randomk import RandomK
from horovod_sparse.compressors.redsync import RedSync
from horovod_sparse.compressors.schedules import Schedule, warmup
from horovod_sparse.compressors.sidco import SIDCo
from horovod_sparse.compressors.threshold import Threshold, suggested_threshold
from horovod_sparse.compressors.topk import TopK
from horovod_sparse.core.averaging import WeightedAverage
from horovod_sparse.numpy.allreduce import SparseAllreduce

__all__ = [
    "DGC",
    "GaussianK",
    "MiCRO",
    "MomentumCorrection",
    "NoOp",
    "RandomBlock",
    "RandomK",
    "RedSync",
    "SIDCo",
    "Schedule",
    "SparseAllreduce",
    "Threshold",
    "TopK",
    "WeightedAverage",
    "suggested_threshold",
    "warmup",
]
