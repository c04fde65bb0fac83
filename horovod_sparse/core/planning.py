"""The plan of one optimizer: made for its compressor, from a network that is given or measured. Imports no framework."""

from __future__ import annotations

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.exchange.network import MEASURED, parse_network
from horovod_sparse.exchange.planner import Conditions, Planner


def planner_for(compressor: Compressor, world: int, measured: Conditions | None) -> Planner | None:
    """Return what chooses the exchanges of a compressor's buckets; None if the compressor does.

    Args:
        compressor: its `network` says whether there is a plan.
        world: the number of workers. One worker has nothing to plan.
        measured: what was measured; None if nothing was yet.
    """
    if compressor.network is None or world == 1:
        return None
    if compressor.network != MEASURED:
        return Planner(Conditions(parse_network("network", compressor.network)), world, balances=compressor.balances)
    return None if measured is None else Planner(measured, world, balances=compressor.balances)
