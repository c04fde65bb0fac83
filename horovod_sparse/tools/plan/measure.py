"""Measure the network that joins the workers of this run, with Horovod's collectives of arrays in the hosts' memory.

Medians of a few timings: the processors are shared with others, so some timings are far too long and none is too short.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from horovod_sparse.exchange.network import CYCLE, Call, Network

TINY = 1
"""Numbers of each part of a message that takes no time beyond its latency."""
TOGETHER = 32
"""Alltoalls that are started together. Horovod carries them out one after the other: it does not fuse them."""
REPETITIONS = 21
FIRST, MOST = 2**14, 2**24
"""Numbers in the first message of the search for one that is long enough, and in the longest."""
LONG = 0.02
"""Seconds that a message must take for its bytes to be what counts."""

Run = Callable[[], object]
"""Starts collectives and waits for them."""


class Measured(NamedTuple):
    """What all workers agree on."""

    network: Network
    workers: int
    rank: int


class Collectives:
    """Horovod's collectives on zeros; `hvd` is the module `horovod.torch`."""

    def __init__(self, hvd: Any) -> None:
        import torch

        self._hvd, self._torch = hvd, torch
        self.world: int = hvd.size()

    def run(self, calls: Iterable[Call], name: str) -> Run:
        """Return what starts collectives together, and waits for all of them."""
        begin = [self._starter(call, f"{name}.{number}") for number, call in enumerate(calls)]

        def run() -> None:
            for handle in [start() for start in begin]:
                self._hvd.synchronize(handle)

        return run

    def _starter(self, call: Call, name: str) -> Callable[[], Any]:
        reduces = call.kind == "allreduce"
        dtype = self._torch.float16 if call.itemsize == 2 else self._torch.float32 if reduces else self._torch.int32
        message = self._torch.zeros(call.length, dtype=dtype)
        if reduces:
            return partial(self._hvd.allreduce_async_, message, name=name, op=self._hvd.Sum)
        return partial(getattr(self._hvd, f"{call.kind}_async"), message, name=name)

    def agreed(self, seconds: float) -> float:
        """Return the median of the workers' numbers, the same on all of them."""
        return float(statistics.median(self._hvd.allgather_object(seconds)))


def seconds(run: Run, repetitions: int) -> float:
    """Return the median time of this worker. The first time is for Horovod to learn the messages, and does not count."""
    # In a loop without pauses every collective would begin with a cycle of Horovod, which is not so in training.
    pauses = random.Random(0)
    spent = []
    for _ in range(1 + repetitions):
        time.sleep(pauses.uniform(0.0, CYCLE))
        begun = time.perf_counter()
        run()
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent[1:])


def measure(collectives: Collectives) -> Network:
    """Measure the network. All workers call this, and get the same numbers."""
    world = collectives.world
    tiny = Call("alltoall", TINY * world)
    one = collectives.agreed(seconds(collectives.run([tiny], "plan.one"), REPETITIONS))
    many = collectives.agreed(seconds(collectives.run([tiny] * TOGETHER, "plan.many"), REPETITIONS))
    # One more alltoall takes its messages' latency, and does not wait for Horovod's next cycle.
    latency = max(0.0, (many - one) / (TOGETHER - 1) / tiny.messages(world))
    wait = max(0.0, one - tiny.messages(world) * latency)
    rates = [_rate(collectives, kind, Network(latency, 1.0, wait)) for kind in ("allreduce", "allgather")]
    return Network(latency, statistics.mean(rates), wait)


def _rate(collectives: Collectives, kind: str, known: Network) -> float:
    """Return the bytes per second of a collective, without what is known of its latency."""
    world, length = collectives.world, FIRST
    while True:
        call = Call(kind, length)
        run = collectives.run([call], f"plan.{kind}.{length}")
        spent = collectives.agreed(seconds(run, 1))
        if spent >= LONG or length >= MOST:
            break
        length *= 4
    spent = collectives.agreed(seconds(run, REPETITIONS // 4))
    rest = spent - known.wait - call.messages(world) * known.latency
    return call.bytes_sent(world) / max(rest, 0.1 * spent)


def measured() -> Measured:
    """Start Horovod and measure. Raise SystemExit, with what to do, where that is not possible."""
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise SystemExit(f"--measure needs PyTorch and Horovod for it ({error}); see horovod-sparse check") from error
    hvd.init()
    if hvd.size() < 2:
        raise SystemExit(
            f"--measure needs at least 2 workers, got {hvd.size()}: start it with a launcher, as in "
            "mpirun -np 2 horovod-sparse plan --measure --parameters 25.6M"
        )
    return Measured(measure(Collectives(hvd)), hvd.size(), hvd.rank())
