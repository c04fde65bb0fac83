"""What every adapter offers beside the compressors. Imports no framework. Tested by tests/compressors/test_registry.py."""

from horovod_sparse.compressors.momentum import MomentumCorrection as MomentumCorrection
from horovod_sparse.compressors.schedules import Schedule as Schedule
from horovod_sparse.core.joining import joined as joined
from horovod_sparse.exchange.pairs import Pairs as Pairs
from horovod_sparse.exchange.shared import SharedIndices as SharedIndices
from horovod_sparse.exchange.union import Union as Union
