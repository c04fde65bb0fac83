"""NumPy adapter: the compressors on arrays, over an mpi4py communicator, which is passed in, or all in one process."""

from horovod_sparse import compressors as _compressors
from horovod_sparse import public as _public
from horovod_sparse.compressors import *
from horovod_sparse.numpy.allreduce import SparseAllreduce
from horovod_sparse.numpy.virtual import VirtualWorkers
from horovod_sparse.public import *

__all__ = ["SparseAllreduce", "VirtualWorkers"]
__all__ += _public.__all__
__all__ += _compressors.__all__
