"""Measure the network that joins the workers of this run, with Horovod's collectives of arrays in the hosts' memory."""

from __future__ import annotations

from typing import NamedTuple

from horovod_sparse.exchange.measure import measure
from horovod_sparse.exchange.network import Network


class Measured(NamedTuple):
    """What all workers agree on."""

    network: Network
    workers: int
    rank: int


def measured() -> Measured:
    """Start Horovod and measure. Raise SystemExit, with what to do, where that is not possible."""
    try:
        import horovod.torch as hvd

        from horovod_sparse.torch.network import TimedCollectives
    except ImportError as error:
        raise SystemExit(f"--measure needs PyTorch and Horovod for it ({error}); see horovod-sparse check") from error
    hvd.init()
    if hvd.size() < 2:
        raise SystemExit(
            f"--measure needs at least 2 workers, got {hvd.size()}: start it with a launcher, as in "
            "mpirun -np 2 horovod-sparse plan --measure --parameters 25.6M"
        )
    found = measure(TimedCollectives(hvd.global_process_set, "horovod_sparse"))
    return Measured(found, hvd.size(), hvd.rank())
