"""NumPy adapter: the compressors on arrays, over an mpi4py communicator, for people without a deep-learning framework.

The other frameworks are tested against its array operations. It does not import MPI: the communicator is passed in.
"""

from horovod_sparse import compressors as _compressors
from horovod_sparse.compressors import *
from horovod_sparse.compressors.momentum import MomentumCorrection
from horovod_sparse.compressors.schedules import Schedule, warmup
from horovod_sparse.compressors.threshold import suggested_threshold
from horovod_sparse.core.averaging import WeightedAverage
from horovod_sparse.numpy.allreduce import SparseAllreduce

__all__ = ["MomentumCorrection", "Schedule", "SparseAllreduce", "WeightedAverage", "suggested_threshold", "warmup"]
__all__ += _compressors.__all__
