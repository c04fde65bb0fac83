"""Where the time of a sparse training step goes, beside computation alone; under any launcher. PyTorch only.

    sudo .venv/bin/python benchmarks/hosts.py --hosts 2 --rate 1gbit -- .venv/bin/python benchmarks/step_timeline.py \
        --model linear --width 1024 --layers 24 --batch-size 16

Takes the options of step_time.py, whose contenders it times: computation alone and one sparse row (`--rows`), in turns. Prints
what the parts of the step take on worker 0, in units of `residual.add_(gradient)`, and when each part is at work. What the
parts do not explain is the rest: hooks, the optimizer's update with gradients that are no longer in the caches, and the
memory and cores that Horovod and the other worker use meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import machine
import markdown
import torch
from step_contenders import ALONE, MODELS
from step_time import SETTLING, Contender, make, parse

import horovod_sparse.torch as hvd
from horovod_sparse.torch import reducer as reducers

PARTS = {
    "hand_over": "gradients remembered and checked for changes",
    "take": "gradients taken into residuals",
    "select": "entries selected and packed",
    "start": "collectives handed to Horovod",
    "wait": "waiting for the other workers and the network",
    "write": "dense gradients written",
}
"""What is timed, in the order of a step."""


class Clock:
    """Notes when each part of a step begins and ends."""

    def __init__(self) -> None:
        self.started = 0.0
        self.spans: list[tuple[str, float, float]] = []
        """Part, begin and end, in seconds since the step began."""

    def timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, timed. None calls another one that is timed."""

        def call(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.spans.append((part, begun - self.started, time.perf_counter() - self.started))

        return call

    def watch(self, contender: Contender) -> None:
        """Time the parts of a contender's steps. Its pipeline must be there: after the first step."""
        reducer = contender.optimizer._sparse_reducer
        pipeline, collectives = reducer.pipeline, reducer._collectives
        start = collectives.start

        def start_and_wait(*arguments: Any) -> Callable[[], Any]:
            return self.timed("wait", start(*arguments))

        pipeline.arrive_together = self.timed("take", pipeline.arrive_together)
        for bucket in pipeline.buckets:
            bucket.begin = self.timed("select", bucket.begin)
        pipeline.advance = self.timed("write", pipeline.advance)
        collectives.start = self.timed("start", start_and_wait)
        reducers.hand_over = self.timed("hand_over", reducers.hand_over)
        reducers.first_changed = self.timed("hand_over", reducers.first_changed)


def table(seconds: dict[str, list[float]], whole: float, alone: float, unit: float) -> str:
    """Markdown: medians, in milliseconds and units."""
    spent = {title: statistics.median(seconds[part]) for part, title in PARTS.items()}
    beyond = whole - alone
    spent |= {"the rest": beyond - sum(spent.values()), "together: the step beyond computation": beyond}
    rows = [[title, f"{1000 * one:.1f}", f"{one / unit:.2f}"] for title, one in spent.items()]
    return markdown.table(["part of the step", "ms", "units"], rows)


def timeline(spans: list[tuple[str, float, float]], whole: float) -> str:
    """One line per part, a character per hundredth of the step: where it was at work."""
    lines = []
    for part, title in PARTS.items():
        marks = ["."] * 100
        for name, begin, end in spans:
            if name == part:
                first, last = int(100 * begin / whole), int(100 * end / whole)
                marks[first : last + 1] = "#" * (min(last, 99) - first + 1)
        lines.append(f"{''.join(marks[:100])} {title}")
    return "\n".join(lines)


def main() -> None:
    if "--rows" not in sys.argv:
        sys.argv += ["--rows", "SIDCo 0.001"]
    args: argparse.Namespace = parse()
    hvd.init()
    task = MODELS[args.model](args)
    settings = {"granularity": args.granularity}
    contenders = [make(name, name, task, settings) for name in (ALONE, args.rows[0])]
    numel = sum(parameter.numel() for parameter in contenders[0].model.parameters())
    residual, gradient = torch.zeros(numel), torch.zeros(numel)
    generator = torch.Generator().manual_seed(hvd.rank())
    clock = Clock()
    seconds: dict[str, list[float]] = defaultdict(list)
    units: dict[str, list[float]] = defaultdict(list)
    middle: list[tuple[float, list[tuple[str, float, float]]]] = []
    for number in range(SETTLING + args.rounds):
        batch = task.batch(generator)
        for contender in contenders:
            if number == SETTLING:
                contender.seconds.clear()
            hvd.barrier()
            clock.started = time.perf_counter()
            contender.step(batch)
        if number == SETTLING - 1:
            clock.watch(contenders[1])
        elif number >= SETTLING:
            for part in PARTS:
                seconds[part].append(sum(end - begin for name, begin, end in clock.spans if name == part))
            middle.append((contenders[1].seconds[-1], list(clock.spans)))
        clock.spans.clear()
        for working in ("together", "alone"):
            hvd.barrier()
            started = time.perf_counter()
            if working == "together" or hvd.rank() == 0:
                residual.add_(gradient)
            units[working].append(time.perf_counter() - started)
    if hvd.rank() == 0:
        unit, unit_alone = (statistics.median(units[working]) for working in ("together", "alone"))
        alone, whole = (statistics.median(contender.seconds) for contender in contenders)
        print(
            f"{contenders[1].name}, {task.title}: {numel:,} parameters, {hvd.size()} workers; {args.rounds} rounds\n"
            f"{machine.describe()}, {torch.get_num_threads()} threads per worker\n"
            f"computation alone {1000 * alone:.1f} ms, the whole step {1000 * whole:.1f} ms; "
            f"a unit is {1000 * unit:.1f} ms while all workers do the same, {1000 * unit_alone:.1f} ms for one alone\n"
        )
        print(table(seconds, whole, alone, unit))
        print(f"\nA step of the median length:\n\n{timeline(sorted(middle)[len(middle) // 2][1], whole)}", flush=True)


if __name__ == "__main__":
    main()
