"""What every adapter offers beside the compressors. Imports no framework."""

from horovod_sparse.compressors.momentum import MomentumCorrection
from horovod_sparse.compressors.schedules import Schedule
from horovod_sparse.compressors.threshold import suggested_threshold
from horovod_sparse.core.averaging import WeightedAverage
from horovod_sparse.core.stats_log import StatsLog

__all__ = ["MomentumCorrection", "Schedule", "StatsLog", "WeightedAverage", "suggested_threshold"]
