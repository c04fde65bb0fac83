"""Predict bytes and time of a step with each exchange, on a network and without training. Imports no framework."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from horovod_sparse.compressors.base import BUCKET_BYTES, Compressor
from horovod_sparse.compressors.micro import MiCRO
from horovod_sparse.compressors.randomblock import RandomBlock
from horovod_sparse.compressors.sidco import SIDCo
from horovod_sparse.contrib.lengths import ENTRIES
from horovod_sparse.core.plan import first_sparse_step, rounds_of
from horovod_sparse.exchange.pairs import Pairs
from horovod_sparse.exchange.protocols import Round
from horovod_sparse.exchange.shared import Dense
from horovod_sparse.tools.quantities import add_optimizer, parse_bandwidth, parse_count, parse_latency, parse_number

CYCLE = 0.001
"""Horovod's default cycle in seconds (`HOROVOD_CYCLE_TIME`)."""
FUSION_BYTES = 128 * 2**20
"""Bytes that Horovod reduces together by default (`HOROVOD_FUSION_THRESHOLD`)."""
LATENCY = 50e-6
"""Seconds of a message, if nobody says otherwise; about what TCP takes within a data centre."""
_MATRIX, _RANK = 1024, 4
"""PowerSGD's bytes depend on the shapes of the parameters: these are taken to be square matrices with so many rows."""
LEFT_OUT = f"""\
Left out: the time to select, to add up and to factorise, what backward hides of the communication, and
waiting for slow workers. All collectives are taken to be rings; PowerSGD's matrices have {_MATRIX} rows.
RandomBlock trains only within compression.ahead. To measure instead: horovod-sparse try"""
_WITHIN = "\nLinks within a node are taken to be free."


Rounds = Sequence[Sequence[Round]]
"""The collectives of a step. Those of one round do not wait for each other; a round waits for the one before."""


class Network(NamedTuple):
    """A network that joins nodes, with one card each.

    The workers of a ring stand node by node, so that a ring crosses each card once: whatever the number of workers on a node,
    the card carries what one of them sends, and a message waits as long as the slowest link makes it.
    """

    latency: float
    """alpha, seconds that a message takes beyond its bytes."""
    bandwidth: float
    """B, bytes per second of a card in each direction."""
    wait: float = CYCLE / 2
    """Seconds from handing a collective to Horovod to its first message. At a random time half of its cycle is left."""

    def seconds(self, rounds: Rounds, world: int) -> float:
        """Return `sum over rounds of (wait + sum over its collectives of (messages * latency + bytes sent / bandwidth))`."""
        messages = sum(call.messages(world) for together in rounds for call in together)
        return len(rounds) * self.wait + messages * self.latency + _sent(rounds, world) / self.bandwidth


def _sent(rounds: Rounds, world: int) -> float:
    return sum(call.bytes_sent(world) for together in rounds for call in together)


@dataclass(frozen=True)
class Method:
    """A way of exchanging the gradients of a model."""

    title: str
    argument: str
    """What chooses it; `{ratio}` stands for the ratio."""
    rounds: Callable[[int, float, int], Rounds]
    """Takes parameters, ratio and workers; returns the collectives of a step."""
    trains: bool = True
    sgd: str = "{}"
    """What is written around the argument with SGD."""
    adamw: str = "{}"
    """What is written around it with AdamW."""

    def what(self, ratio: float, optimizer: str) -> str:
        """Return what a user writes."""
        line = self.adamw if optimizer == "adamw" else self.sgd
        return line.format(self.argument.format(ratio=repr(ratio)))

    def bytes_sent(self, parameters: int, ratio: float, world: int) -> float:
        """Return the bytes that each worker sends in a step."""
        return _sent(self.rounds(parameters, ratio, world), world)


def sparse(make: Callable[[float], Compressor]) -> Callable[[int, float, int], Rounds]:
    """Return `Method.rounds` of a compressor, when its ratio has come down to the end."""
    return lambda parameters, ratio, world: _rounds(make(ratio), parameters, ratio, world)


def _rounds(compressor: Compressor, parameters: int, ratio: float, world: int) -> Rounds:
    return list(zip(*(rounds_of(compressor, n, ratio, world) for n in _sizes(parameters)), strict=True))


def _sizes(parameters: int, most: int = BUCKET_BYTES // 4) -> list[int]:
    """Return the sizes of buckets, with at most so many parameters in each."""
    return [min(most, parameters - start) for start in range(0, parameters, most)]


def _dense(dtype: str, itemsize: int) -> Callable[[int, float, int], Rounds]:
    """Return the allreduces of all parameters, as many together as Horovod fuses."""
    most = FUSION_BYTES // itemsize
    return lambda parameters, ratio, world: [[Round("allreduce", n, dtype) for n in _sizes(parameters, most)]]


def _power(parameters: int, ratio: float, world: int) -> Rounds:
    """Return PowerSGD's allreduces of all left and of all right factors."""
    return [[Round("allreduce", math.ceil(_RANK * parameters / _MATRIX), "float32")]] * 2


DENSE32 = Method("dense float32", "hvd.Compression.none", _dense("float32", 4))
DENSE16 = Method("dense float16", "hvd.Compression.fp16, DDP's bf16_compress_hook", _dense("float16", 2))
POWER = Method(f"PowerSGD rank {_RANK}", "DDP's powerSGD_hook", _power)
_LOCAL = "LocalUpdates(adamw, model, {})"
PAIRS = Method("pairs", "SIDCo({ratio})", sparse(SIDCo), adamw=_LOCAL)
PACKED = Method(
    "packed pairs",
    'SIDCo({ratio}, exchange=Pairs("packed"))',
    sparse(partial(SIDCo, exchange=Pairs("packed"))),
    adamw=_LOCAL,
)
UNION = Method("union", "MiCRO({ratio})", sparse(MiCRO), adamw=_LOCAL)
SHARED = Method("shared indices", "RandomBlock({ratio})", sparse(RandomBlock), trains=False, adamw=_LOCAL)
METHODS = (DENSE32, DENSE16, POWER, PAIRS, PACKED, UNION, SHARED)
BETWEEN = Method(
    "pairs between nodes",
    PAIRS.argument,
    PAIRS.rounds,
    sgd="DDP: register(model, {}, mesh=mesh)",
    adamw='FSDP2: LocalUpdates(adamw, model, {}, group=mesh["replicate"])',
)
"""Dense within a node; its workers exchange an equal part of every gradient each, with one worker of every other node."""


_MEETING = Round("allgather", ENTRIES + 4, "float64")
"""What `LocalUpdates` gathers before each exchange."""


class Job(NamedTuple):
    """What is to be trained."""

    parameters: int
    ratio: float
    workers: int
    per_node: int
    """Workers on each node, which share its card."""
    computing: float
    """What a worker computes in a step, in seconds."""
    optimizer: str

    @property
    def nodes(self) -> int:
        return self.workers // self.per_node

    @property
    def methods(self) -> Sequence[Method]:
        """All methods that differ here."""
        return METHODS if self.per_node == 1 else (*METHODS, BETWEEN)

    def cost(self, method: Method, where: Network) -> tuple[float, float]:
        """Return the bytes that cross a node's card in each direction in a step, and the seconds that the exchange takes."""
        # With BETWEEN all workers of a node exchange at the same time.
        rings, world = (self.per_node, self.nodes) if method is BETWEEN else (1, self.workers)
        rounds = method.rounds(math.ceil(self.parameters / rings), self.ratio, world)
        if self.optimizer == "adamw" and method.adamw != "{}":
            rounds = [[_MEETING], *rounds]
        return rings * _sent(rounds, world), where._replace(bandwidth=where.bandwidth / rings).seconds(rounds, world)


def warm_up(compressor: Compressor, parameters: int, world: int) -> tuple[int, int, float]:
    """Return the steps of a warm-up, how many of them, the first ones, are dense, and the bytes that a worker sends in all."""
    dense, steps, sent = first_sparse_step(compressor, world), 0, 0.0
    whole: Rounds = [Dense().rounds(numel, 0, 0, world) for numel in _sizes(parameters)]
    for stair in compressor.schedule.stairs():
        ratio, steps = compressor.schedule.ratio(stair.start), stair.stop
        rounds = whole if stair.start < dense else _rounds(compressor, parameters, ratio, world)
        sent += len(stair) * _sent(rounds, world)
    return steps, dense, sent


def text(where: Network, job: Job) -> str:
    """Return the whole report."""
    rows = [("method", "bytes per step", "exchange ms", "step ms", "dense fp16 / it", "what to write")]
    costs = {method: job.cost(method, where) for method in job.methods}
    steps = {method: job.computing + seconds for method, (_, seconds) in costs.items()}
    for method, (sent, seconds) in costs.items():
        numbers = f"{1e3 * seconds:,.2f}", f"{1e3 * steps[method]:,.2f}", f"{steps[DENSE16] / steps[method]:.2f}"
        rows.append((method.title, f"{sent:,.0f}", *numbers, method.what(job.ratio, job.optimizer)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    best = min((method for method in job.methods if method.trains), key=steps.__getitem__)
    on_each = f", {job.per_node:,} on each node" if job.per_node > 1 else ""
    heading = (
        f"{job.parameters:,} parameters, ratio {job.ratio:g}, {job.workers:,} workers{on_each}, {1e3 * job.computing:g} ms of "
        f"computing\n{where.bandwidth / 1e6:,.1f} MB/s each way ({8e-9 * where.bandwidth:.3g} gbit), {1e6 * where.latency:.3g} "
        f"us per message, {1e3 * where.wait:.3g} ms until a collective starts\n"
    )
    lines = [
        "  ".join([title.ljust(widths[0]), *map(str.rjust, numbers, widths[1:]), what])
        for title, *numbers, what in rows
    ]
    advice = f"Fastest exchange of those that train: {best.title}, {best.what(job.ratio, job.optimizer)}"
    return "\n".join([heading, *lines, "", *_remarks(job), advice, LEFT_OUT + _WITHIN * (job.per_node > 1)])


def _remarks(job: Job) -> list[str]:
    """Return what a warm-up takes, and up to which ratio bytes are saved."""
    warming, dense, in_all = warm_up(SIDCo(job.ratio), job.parameters, job.workers)
    dense16 = DENSE16.bytes_sent(job.parameters, job.ratio, job.workers)
    beginning = (
        f"The table is for steps after the warm-up. That of {PAIRS.argument.format(ratio=repr(job.ratio))} takes "
        f"{warming:,} steps, of which the first {dense:,} are\n"
        f"dense float32. In all of them a worker sends {in_all:,.0f} bytes, as much as in "
        f"{in_all / dense16:,.1f} dense float16 steps."
    )
    # (world - 1) * ratio * 8 bytes by allgather, and 2 (world - 1)/world * 2 bytes by allreduce.
    fewer = f"Without spare room, pairs send fewer bytes than dense float16 up to ratio {0.5 / job.workers:.3g}"
    if job.per_node > 1:
        most = 0.5 * (job.workers - 1) / job.workers / (job.nodes - 1)
        fewer += f", between nodes up to {min(most, 1.0):.3g}"
    return [beginning, f"{fewer}."]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    ratio = partial(parse_number, "ratio", most=1.0, example="0.001")
    computing = partial(parse_number, "step-ms", most=1e9, example="110")
    add = parser.add_argument
    add("--parameters", type=partial(parse_count, "parameters"), required=True, metavar="N", help="as 25.6M or 350k")
    add("--workers", type=partial(parse_count, "workers", least=2), required=True, metavar="N", help="at least 2")
    add(
        "--per-node",
        type=partial(parse_count, "per-node"),
        default=1,
        metavar="N",
        help="workers on each node; default: 1",
    )
    bandwidth = "of a node's network card in each direction, as 10gbit or 1.2GB"
    add("--bandwidth", type=partial(parse_bandwidth, "bandwidth"), required=True, metavar="RATE", help=bandwidth)
    text = "what a worker computes in a step, without any exchange"
    add("--step-ms", type=computing, required=True, metavar="MS", help=text)
    text = f"of a message, as 50us or 0.1ms; default: {1e6 * LATENCY:g}us"
    add("--latency", type=partial(parse_latency, "latency"), default=LATENCY, metavar="TIME", help=text)
    add("--ratio", type=ratio, default=0.01, help="of the entries that are sent; default: 0.01")
    add_optimizer(parser)


def run(arguments: argparse.Namespace) -> int:
    """Predict, print the results, and return the exit status."""
    workers, per_node = arguments.workers, arguments.per_node
    if workers % per_node or workers == per_node:
        raise SystemExit(
            f"plan: workers must be those of at least 2 nodes with {per_node} on each, got {workers}; give those of all nodes "
            "together, as --workers 32 --per-node 8 for 4 nodes"
        )
    computing = arguments.step_ms / 1e3
    job = Job(arguments.parameters, arguments.ratio, workers, per_node, computing, arguments.optimizer)
    print(text(Network(arguments.latency, arguments.bandwidth), job))
    return 0
