"""NumPy adapter: the compressors on arrays, over an mpi4py communicator, which is passed in, or all in one process."""

from horovod_sparse.compressors import *
from horovod_sparse.numpy.allreduce import SparseAllreduce as SparseAllreduce
from horovod_sparse.numpy.virtual import VirtualWorkers as VirtualWorkers
from horovod_sparse.public import *

# Not our own modules.
__all__ = [name for name, one in globals().items() if name[0] != "_" and getattr(one, "__package__", "") != __name__]
