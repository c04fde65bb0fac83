"""The plan of one optimizer: how each of its buckets is exchanged, on a network that is given or measured. No framework."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.schedules import Schedule
from horovod_sparse.exchange import rounds
from horovod_sparse.exchange.network import MEASURED, parse_network
from horovod_sparse.exchange.planner import Conditions, Planner
from horovod_sparse.exchange.protocols import Kind
from horovod_sparse.exchange.rounds import Way

_log = logging.getLogger("horovod_sparse")


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


def sparse_way(compressor: Compressor, planner: Planner | None, numel: int, k: int, capacity: int) -> Way:
    """Return how a bucket of `numel` entries is exchanged in a step with this k and this capacity of a message."""
    if planner is None:
        return Way(compressor.exchange, compressor.values)
    return planner.fastest(numel, k, capacity)


def stands_in(compressor: Compressor, sparse: Way, used: Way) -> Kind | None:
    """Return the first collective of ranks that are in other steps, if `used` begins with another one.

    `sparse` is what they use if their step is none of the dense ones and their ratio is this rank's.
    """
    # With another ratio they may have another plan. All of them then begin as if there were none.
    usual = compressor.exchange if isinstance(compressor.ratio, Schedule) else sparse.exchange
    return rounds.stands_in(used.exchange, usual)


def log_plan(planner: Planner, ways: Iterable[tuple[str, int, Way]]) -> None:
    """Log how buckets are exchanged, each given as name, number of entries and way."""
    where = planner.conditions.network
    _log.info(
        "plan for %d workers, %.1f MB/s each way, %.3g us per message: %s",
        planner.world,
        where.bandwidth / 1e6,
        1e6 * where.latency,
        "; ".join(f"{name!r} ({numel:,} entries): {way.title}" for name, numel, way in ways),
    )
