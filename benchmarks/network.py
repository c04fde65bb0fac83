"""Compare what `horovod-sparse plan` predicts with the time that Horovod's collectives take; under any launcher.

    sudo .venv/bin/python benchmarks/hosts.py --hosts 4 --rate 1gbit -- .venv/bin/python benchmarks/network.py

The network is measured first, by sending zeros. Then the collectives of each method's step are timed, with
arrays of zeros of exactly the lengths and types that the method sends. These are collectives alone: nothing is selected,
added up or trained. The table shows medians: the processors are shared with others, so some timings are far too long and none
is too short. The error is that of the prediction, as a part of what was measured.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import horovod.torch as hvd
import machine
import markdown
import torch
from horovod.torch import mpi_ops

from horovod_sparse.exchange.protocols import Kind
from horovod_sparse.tools.plan import CYCLE, DENSE16, DENSE32, METHODS, POWER, Method, Network, Round, Rounds
from horovod_sparse.tools.quantities import parse_count
from horovod_sparse.torch.exchange import gather_json

BUDGET = 6.0
"""Seconds that the repetitions of one method take, if the prediction is right."""
MOST_REPETITIONS = 15
FIRST, MOST = 2**14, 2**24
"""Numbers in the first message of the search for one that is long enough, and in the longest."""
REPETITIONS = 21
TOGETHER = 32
"""Alltoalls that are started together. Horovod carries them out one after the other: it does not fuse them."""
LONG = 0.02
"""Seconds that a message must take for its bytes to be what counts."""

Run = Callable[[], object]
"""Starts collectives and waits for them."""


def together(calls: Sequence[Round], name: str) -> Run:
    """Return a function that starts these collectives together, sends zeros, and waits for all of them."""
    begin = [_starter(call, f"benchmark.{name}.{number}") for number, call in enumerate(calls)]

    def run() -> None:
        for handle in [start() for start in begin]:
            mpi_ops.synchronize(handle)

    return run


def _starter(call: Round, name: str) -> Callable[[], Any]:
    reduces = call.kind == "allreduce"
    dtype = torch.float16 if call.dtype == "float16" else torch.float32 if reduces else torch.int32
    message = torch.zeros(call.length, dtype=dtype)
    if reduces:
        return partial(mpi_ops.allreduce_async_, message, op=mpi_ops.Sum, name=name)
    return partial(getattr(mpi_ops, f"{call.kind}_async"), message, name=name)


def seconds(run: Run, repetitions: int) -> float:
    """Return the median of the workers' median times, the same on all of them.

    The first time is for Horovod to learn the messages, and does not count.
    """
    # In a loop without pauses every collective would begin with a cycle of Horovod, which is not so in training.
    pauses = random.Random(0)
    spent = []
    for _ in range(1 + repetitions):
        time.sleep(pauses.uniform(0.0, CYCLE))
        begun = time.perf_counter()
        run()
        spent.append(time.perf_counter() - begun)
    everyone = gather_json(statistics.median(spent[1:]), "benchmark.seconds", hvd.global_process_set)
    return float(statistics.median(everyone))


def measure() -> Network:
    """Measure the network. All workers, at least 2, call this and get the same numbers."""
    one, many = (seconds(_alltoalls(calls), REPETITIONS) for calls in (1, TOGETHER))
    # Before an alltoall, Horovod exchanges how long the parts are.
    messages = 2 * (hvd.size() - 1)
    # One more alltoall takes its messages' latency, and does not wait for Horovod's next cycle.
    latency = max(0.0, (many - one) / (TOGETHER - 1) / messages)
    wait = max(0.0, one - messages * latency)
    known = Network(latency, 1.0, wait)
    return Network(latency, statistics.mean(_rate(kind, known) for kind in ("allreduce", "allgather")), wait)


def _alltoalls(calls: int) -> Run:
    """Return a function that starts so many alltoalls of a few bytes together, and waits for all of them."""
    message = torch.zeros(hvd.size(), dtype=torch.int32)

    def run() -> None:
        names = [f"benchmark.tiny.{calls}.{number}" for number in range(calls)]
        for handle in [mpi_ops.alltoall_async(message, name=name) for name in names]:
            mpi_ops.synchronize(handle)

    return run


def _rate(kind: Kind, known: Network) -> float:
    """Return the bytes per second of a collective, without what is known of its latency."""
    world, length = hvd.size(), FIRST
    while True:
        call = Round(kind, length)
        run = together([call], f"{kind}.{length}")
        if seconds(run, 1) >= LONG or length >= MOST:
            break
        length *= 4
    spent = seconds(run, REPETITIONS // 4)
    rest = spent - known.wait - call.messages(world) * known.latency
    return call.bytes_sent(world) / max(rest, 0.1 * spent)


def timed(rounds: Rounds, name: str, repetitions: int) -> float:
    """The median time of a step's collectives, the same on all workers."""
    runs = [together(calls, f"{name}.{number}") for number, calls in enumerate(rounds)]
    return seconds(lambda: [run() for run in runs], repetitions)


def compare(where: Network, parameters: int, ratios: Sequence[float]) -> Iterator[tuple[list[str], float]]:
    """Time each sparse method at each ratio, and the dense ones once; a line of the table and the error of each."""
    world, dense = hvd.size(), (DENSE32, DENSE16, POWER)
    cases: list[tuple[Method, float]] = [(method, 1.0) for method in dense]
    cases += [(method, ratio) for ratio in ratios for method in METHODS if method not in dense]
    for method, ratio in cases:
        predicted = where.seconds(method.rounds(parameters, ratio, world), world)
        repetitions = min(MOST_REPETITIONS, max(1, int(BUDGET / predicted)))
        title = method.title if ratio == 1.0 else f"{method.title}, {ratio:g}"
        taken = timed(method.rounds(parameters, ratio, world), title, repetitions)
        sent, error = method.bytes_sent(parameters, ratio, world), predicted / taken - 1.0
        times = [f"{1e3 * seconds:,.2f}" for seconds in (predicted, taken)]
        yield [title, f"{sent:,.0f}", *times, f"{100 * error:+.0f}"], error


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--parameters", type=partial(parse_count, "parameters"), default="25.2M", metavar="N")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.001, 0.01], metavar="RATIO")
    args = parser.parse_args()
    hvd.init()
    where = measure()
    rows, errors = zip(*compare(where, args.parameters, args.ratios), strict=True)
    if hvd.rank():
        return
    print(
        f"{args.parameters:,} parameters, {hvd.size()} workers on {hvd.size() // hvd.local_size()} hosts; measured: "
        f"{where.bandwidth / 1e6:.1f} MB/s each way, {1e6 * where.latency:.0f} us per message, "
        f"{1e3 * where.wait:.2f} ms until a collective starts\n{machine.describe()}\n"
    )
    header = ["method", "bytes sent per step and worker", "predicted, ms", "measured, ms", "error, %"]
    print(markdown.table(header, rows))
    sizes = [abs(error) for error in errors]
    print(f"\nMedian error {100 * statistics.median(sizes):.0f} %, largest {100 * max(sizes):.0f} %.", flush=True)


if __name__ == "__main__":
    main()
