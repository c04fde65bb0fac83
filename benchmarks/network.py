"""Compare what `horovod-sparse plan` predicts with the time that Horovod's collectives take; under any launcher.

    sudo .venv/bin/python benchmarks/hosts.py --hosts 4 --rate 1gbit -- .venv/bin/python benchmarks/network.py

The network is measured first. Then the collectives of each method's step are timed, with
arrays of zeros of exactly the lengths and types that the method sends. These are collectives alone: nothing is selected,
added up or trained. The table shows medians; the error is that of the prediction, as a part of what was measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import horovod.torch as hvd
import machine
import markdown
from network_measure import Collectives, agreed, measure, seconds

from horovod_sparse.tools.plan import DENSE16, DENSE32, METHODS, POWER, Method, Network, Rounds
from horovod_sparse.tools.quantities import parse_count

BUDGET = 6.0
"""Seconds that the repetitions of one method take, if the prediction is right."""
MOST_REPETITIONS = 15


class Row(NamedTuple):
    """One method, predicted and measured, in seconds."""

    title: str
    sent: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    def cells(self) -> list[str]:
        times = [f"{1e3 * seconds:,.2f}" for seconds in (self.predicted, self.measured)]
        return [self.title, f"{self.sent:,.0f}", *times, f"{100 * self.error:+.0f}"]


def timed(collectives: Collectives, rounds: Rounds, name: str, repetitions: int) -> float:
    """The median time of a step's collectives, the same on all workers."""
    runs = [collectives.run(calls, f"{name}.{number}") for number, calls in enumerate(rounds)]

    def step() -> None:
        for run in runs:
            run()

    return agreed(collectives, seconds(step, repetitions))


def compare(collectives: Collectives, where: Network, parameters: int, ratios: Sequence[float]) -> Iterator[Row]:
    """Time each sparse method at each ratio, and the dense ones once."""
    world = collectives.world
    cases: list[tuple[Method, float]] = [(method, 1.0) for method in (DENSE32, DENSE16, POWER)]
    cases += [(method, ratio) for ratio in ratios for method in METHODS if method not in (DENSE32, DENSE16, POWER)]
    for method, ratio in cases:
        predicted = method.seconds(where, parameters, ratio, world)
        repetitions = min(MOST_REPETITIONS, max(1, int(BUDGET / predicted)))
        title = method.title if ratio == 1.0 else f"{method.title}, {ratio:g}"
        rounds = method.rounds(parameters, ratio, world)
        taken = timed(collectives, rounds, title, repetitions)
        yield Row(title, method.bytes_sent(parameters, ratio, world), predicted, taken)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--parameters", type=partial(parse_count, "parameters"), default="25.2M", metavar="N")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.001, 0.01], metavar="RATIO")
    args = parser.parse_args()
    hvd.init()
    collectives = Collectives(hvd.global_process_set, "benchmark")
    where = measure(collectives)
    rows = list(compare(collectives, where, args.parameters, args.ratios))
    if hvd.rank():
        return
    print(
        f"{args.parameters:,} parameters, {hvd.size()} workers on {hvd.size() // hvd.local_size()} hosts; measured: "
        f"{where.bandwidth / 1e6:.1f} MB/s each way, {1e6 * where.latency:.0f} us per message, "
        f"{1e3 * where.wait:.2f} ms until a collective starts\n{machine.describe()}\n"
    )
    header = ["method", "bytes sent per step and worker", "predicted, ms", "measured, ms", "error, %"]
    print(markdown.table(header, [row.cells() for row in rows]))
    errors = [abs(row.error) for row in rows]
    print(f"\nMedian error {100 * statistics.median(errors):.0f} %, largest {100 * max(errors):.0f} %.", flush=True)


if __name__ == "__main__":
    main()
