"""What every adapter offers beside the compressors. Imports no framework."""

from horovod_sparse.compressors.momentum import Clip, MomentumCorrection
from horovod_sparse.compressors.schedules import Schedule
from horovod_sparse.contrib.stats_log import StatsLog
from horovod_sparse.exchange.balanced import Balanced
from horovod_sparse.exchange.hierarchical import Hierarchical
from horovod_sparse.exchange.pairs import Pairs
from horovod_sparse.exchange.shared import SharedIndices
from horovod_sparse.exchange.union import Union

__all__ = [
    "Balanced",
    "Clip",
    "Hierarchical",
    "MomentumCorrection",
    "Pairs",
    "Schedule",
    "SharedIndices",
    "StatsLog",
    "Union",
]
