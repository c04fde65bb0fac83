"""Measure the network that joins some workers, by the time that collectives of arrays of zeros take. Imports no framework.

Medians of a few timings: the processors are shared with others, so some timings are far too long and none is too short.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from horovod_sparse.exchange.network import CYCLE, Call, Network
from horovod_sparse.exchange.protocols import Kind

TINY = 1
"""Numbers of each part of a message that takes no time beyond its latency."""
FIRST, MOST = 2**14, 2**24
"""Numbers in the first message of the search for one that is long enough, and in the longest."""

Run = Callable[[], object]
"""Starts collectives and waits for them."""


class Collectives(Protocol):
    """What a framework supplies to measure with. All workers call the same methods in the same order."""

    world: int

    def run(self, calls: Sequence[Call], name: str) -> Run:
        """Return what starts collectives of zeros together, and waits for all of them."""

    def everyone(self, value: Any) -> list[Any]:
        """Return every worker's value, which JSON can hold, in rank order. This blocks."""


class Effort(NamedTuple):
    """How exactly the network is measured."""

    repetitions: int
    together: int
    """Alltoalls that are started together. Horovod carries them out one after the other: it does not fuse them."""
    long: float
    """Seconds that a message must take for its bytes to be what counts."""


THOROUGH = Effort(repetitions=21, together=32, long=0.02)
"""It takes a few seconds."""
QUICK = Effort(repetitions=7, together=8, long=0.01)
"""It takes less than a second where a message's latency is below a millisecond."""
_LEAST = 3
"""The least number of repetitions of long messages."""


def agreed(collectives: Collectives, number: float) -> float:
    """Return the median of the workers' numbers, the same on all of them."""
    return float(statistics.median(collectives.everyone(number)))


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


def measure(collectives: Collectives, effort: Effort = THOROUGH) -> Network:
    """Measure the network. All workers, at least 2, call this and get the same numbers."""

    def spent(calls: int, name: str) -> float:
        return agreed(collectives, seconds(collectives.run([tiny] * calls, name), effort.repetitions))

    tiny = Call("alltoall", TINY * collectives.world)
    one, many = spent(1, "plan.one"), spent(effort.together, "plan.many")
    # One more alltoall takes its messages' latency, and does not wait for Horovod's next cycle.
    latency = max(0.0, (many - one) / (effort.together - 1) / tiny.messages(collectives.world))
    wait = max(0.0, one - tiny.messages(collectives.world) * latency)
    known = Network(latency, 1.0, wait)
    rates = _rate(collectives, "allreduce", known, effort), _rate(collectives, "allgather", known, effort)
    return Network(latency, statistics.mean(rates), wait)


def _rate(collectives: Collectives, kind: Kind, known: Network, effort: Effort) -> float:
    """Return the bytes per second of a collective, without what is known of its latency."""
    world, length = collectives.world, FIRST
    while True:
        call = Call(kind, length)
        run = collectives.run([call], f"plan.{kind}.{length}")
        spent = agreed(collectives, seconds(run, 1))
        if spent >= effort.long or length >= MOST:
            break
        length *= 4
    spent = agreed(collectives, seconds(run, max(effort.repetitions // 4, _LEAST)))
    rest = spent - known.wait - call.messages(world) * known.latency
    return call.bytes_sent(world) / max(rest, 0.1 * spent)
