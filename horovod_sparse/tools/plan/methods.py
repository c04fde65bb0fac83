"""The ways of exchanging gradients, as collectives of a step, and where one becomes slower than another. No framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.micro import MiCRO
from horovod_sparse.compressors.randomblock import RandomBlock
from horovod_sparse.compressors.sidco import SIDCo
from horovod_sparse.tools.plan import network
from horovod_sparse.tools.plan.network import Call, Network, Rounds

MOST_WORKERS = 2**20
"""The largest number of workers that is looked at."""
_HALVINGS = 60
"""Each halves the range of ratios that is searched. A float has fewer bits."""


@dataclass(frozen=True)
class Method:
    """A way of exchanging the gradients of a model."""

    title: str
    argument: str
    """What chooses it in `hvd.DistributedOptimizer(compression=...)`; `{ratio}` stands for the ratio."""
    rounds: Callable[[int, float, int], Rounds]
    """Takes parameters, ratio and workers; returns the collectives of a step."""
    by_size: bool = True
    """Whether it sends what is largest, or everything."""

    def bytes_sent(self, parameters: int, ratio: float, world: int) -> float:
        """Return the bytes that each worker sends in a step."""
        rounds = self.rounds(parameters, ratio, world)
        return sum(call.bytes_sent(world) for together in rounds for call in together)

    def seconds(self, where: Network, parameters: int, ratio: float, world: int) -> float:
        """Return how long the collectives of a step take."""
        return where.seconds(self.rounds(parameters, ratio, world), world)


BucketCalls = Callable[[int, int, int, int], Sequence[Call]]
"""Takes a bucket's size, k, capacity and workers; returns one collective for each round."""


def sparse(make: Callable[[float], Compressor], calls: BucketCalls) -> Callable[[int, float, int], Rounds]:
    """Return `Method.rounds` of a compressor, with its own buckets and messages."""

    def rounds(parameters: int, ratio: float, world: int) -> Rounds:
        compressor = make(ratio)
        most = max(1, compressor.bucket_bytes // 4)
        buckets = []
        for start in range(0, parameters, most):
            numel = min(most, parameters - start)
            k = compressor.target_count(numel)
            buckets.append(calls(numel, k, compressor.message_capacity(numel, k, world), world))
        return list(zip(*buckets, strict=True))

    return rounds


def pairs(make: Callable[[float], Compressor] = SIDCo) -> Callable[[int, float, int], Rounds]:
    """Return `Method.rounds` of a compressor that sends pairs."""
    return sparse(make, lambda numel, k, capacity, world: network.pairs(capacity))


def _dense(itemsize: int) -> Callable[[int, float, int], Rounds]:
    return lambda parameters, ratio, world: [network.dense(parameters, itemsize)]


DENSE32 = Method("dense float32", "hvd.Compression.none", _dense(4))
DENSE16 = Method("dense float16", "hvd.Compression.fp16", _dense(2))
PAIRS = Method("pairs", "SIDCo({ratio})", pairs())
COMPACT = Method(
    "compact pairs",
    'SIDCo({ratio}, values="bfloat16")',
    sparse(partial(SIDCo, values="bfloat16"), lambda numel, k, capacity, world: network.compact_pairs(numel, capacity)),
)
BALANCED = Method(
    "balanced",
    "SIDCo({ratio}, balanced=True)",
    sparse(partial(SIDCo, balanced=True), lambda numel, k, capacity, world: network.balanced(k, capacity, world)),
)
UNION = Method(
    "union", "MiCRO({ratio})", sparse(MiCRO, lambda numel, k, capacity, world: network.union(numel, capacity, world))
)
SHARED = Method(
    "shared indices",
    "RandomBlock({ratio})",
    sparse(RandomBlock, lambda numel, k, capacity, world: network.shared_indices(capacity)),
    by_size=False,
)
METHODS = (DENSE32, DENSE16, PAIRS, COMPACT, BALANCED, UNION, SHARED)


def break_even_ratio(where: Network, parameters: int, world: int, method: Method, dense: Method) -> float:
    """Return the largest ratio at which `method` takes less time than `dense`; 0 if there is none, 1 if all do.

    A search by halves: the time of a method with messages never falls when the ratio grows.
    """
    limit = dense.seconds(where, parameters, 1.0, world)

    def wins(ratio: float) -> bool:
        return method.seconds(where, parameters, ratio, world) < limit

    if wins(1.0):
        return 1.0
    least, most = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (middle, most) if wins(middle) else (least, middle)
    return least


def break_even_workers(where: Network, parameters: int, ratio: float, method: Method, dense: Method) -> int:
    """Return the largest number of workers at which `method` takes less time than `dense`.

    0 if it is slower with 2 workers, `MOST_WORKERS` if it is faster with so many. Pairs that lose with some number of workers
    lose with all larger ones: per worker, they take the same time for each other worker, and a ring allreduce less and less.
    """

    def wins(world: int) -> bool:
        return method.seconds(where, parameters, ratio, world) < dense.seconds(where, parameters, ratio, world)

    if wins(MOST_WORKERS):
        return MOST_WORKERS
    least, most = 1, MOST_WORKERS
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if wins(middle) else (least, middle)
    return least if least > 1 else 0


def fastest(where: Network, parameters: int, ratio: float, world: int, methods: Sequence[Method] = METHODS) -> Method:
    """Return the method that takes the least time."""
    return min(methods, key=lambda method: method.seconds(where, parameters, ratio, world))
