"""No sparsification, through the whole sparse path. Tested by tests/compressors/test_laws.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.compressors.schedules import Schedule
from horovod_sparse.exchange.shared import Dense
from horovod_sparse.ops.protocol import Array, Ops, Selection


@dataclass(eq=False, repr=False, kw_only=True)
class NoOp(Compressor):
    """Sends every entry (ratio 1) by allreduce, which shows what the path itself costs.

    Args: those of `Compressor` except `ratio` and `exchange`.
    """

    default_exchange = Dense()
    chooses = ()

    ratio: float | Schedule = field(default=1.0, init=False)

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        return ops.select_above(x, -1.0, capacity)
