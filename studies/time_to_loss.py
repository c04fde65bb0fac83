"""How long each way to exchange gradients takes to reach the same held-out loss.

    python studies/time_to_loss.py train charlm
    sudo .venv/bin/python studies/time_to_loss.py race charlm --rate 1gbit --picture docs/plain-line.png

`train` finds each row's learning rate, the best of the task's for one seed, trains three seeds with it on local workers, and
prints how many steps they take. `race` compares the plain line, with the learning rate of dense training: it trains from
beginning to end on two hosts, which are network namespaces of this machine; nothing else may run meanwhile.

Every run leaves its log in the output folder and is not repeated while the log is there.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import around
import hosts
import machine
import markdown
import numpy as np
from loss_runs import DENSE, RACE, ROWS, SEEDS, TASKS, WORKERS, Curve, Store, Task, rows_of


def train(args: argparse.Namespace, store: Store) -> None:
    """Train what is not there yet, and print steps to the target and losses at the end."""
    target = store.target()
    header = ["exchange", "learning rate", "end with each rate, one seed", "end, each seed", "mean"]
    header += ["bytes sent per step and worker", "steps to the target, each seed", "mean steps"]
    rows = []
    for name in args.rows or rows_of(args.task):
        (rate, losses), curves, factor = store.tuned(name), store.curves(name), ROWS[name].rate_factor
        tried = ", ".join(f"{loss(end)} ({factor * one:g})" for one, end in losses.items())
        ends = [curve.last for curve in curves]
        steps = [curve.reached(target, curve.steps) or math.inf for curve in curves]
        cells = [name, f"{factor * rate:g}", tried, ", ".join(map(loss, ends)), loss(statistics.fmean(ends))]
        cells += [sent(name, curves), ", ".join(map(count, steps)), count(statistics.fmean(steps))]
        rows.append(cells)
        print(f"{name}: {', '.join(cells[1:])}", file=sys.stderr, flush=True)
    print(f"{machine.describe()}, Python {platform.python_version()}, PyTorch {version('torch')}")
    print(f"target {target:.3f} {store.task.unit}\n\n{markdown.table(header, rows)}")


def race(args: argparse.Namespace, store: Store) -> None:
    """Train each row from beginning to end on the hosts, all with the learning rate that is dense fp32's best."""
    runs: dict[str, list[Curve]] = {name: [] for name in args.rows or RACE}
    network = hosts.Network(args.rate, args.delay, args.loss)
    with hosts.cluster(WORKERS, network) as where:
        target, (rate, _) = store.target(), store.tuned(DENSE)
        # In turns, so that what else happens on the machine concerns all rows.
        for seed in SEEDS:
            for name, curves in runs.items():
                curves.append(store.on_hosts(where, f"{network}-{name}", RACE[name], rate, seed))
                reached = curves[-1].reached(target, curves[-1].seconds)
                print(f"{name}, seed {seed}: {reached} s", file=sys.stderr, flush=True)
    print(f"{machine.describe()}; two hosts at {network}, learning rate {rate:g}, target {target:.3f}\n")
    print(race_table(runs, target))
    if args.picture is not None:
        draw(runs, target, store.task, str(network), args.picture)


def loss(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "diverged"


def count(steps: float) -> str:
    return f"{steps:.0f}" if math.isfinite(steps) else "not reached"


def sent(name: str, curves: Sequence[Curve]) -> str:
    """Bytes per step, which nobody tells of DDP."""
    return "not counted" if name.startswith("DDP") else f"{statistics.fmean(one.bytes_per_step for one in curves):,.0f}"


def race_table(runs: Mapping[str, Sequence[Curve]], target: float) -> str:
    """Time to the target, loss at the end, and bytes of whole runs."""
    times = {name: [curve.reached(target, curve.seconds) for curve in curves] for name, curves in runs.items()}
    medians = {name: statistics.median(time or math.inf for time in reached) for name, reached in times.items()}
    best = min((medians[name] for name in runs if "dense" in name or "DDP" in name), default=math.nan)
    header = ["exchange", "time to the target, s: median (each seed)", "best other's / it", "end: mean (each seed)"]
    rows = []
    for name, curves in runs.items():
        each = ", ".join(f"{time:.1f}" if time else "not reached" for time in times[name])
        ends = [curve.last for curve in curves]
        end = f"{loss(statistics.fmean(ends))} ({', '.join(map(loss, ends))})"
        rows.append([name, f"{medians[name]:.1f} ({each})", f"{best / medians[name]:.2f}", end, sent(name, curves)])
    return markdown.table([*header, "bytes sent per step and worker"], rows)


def draw(runs: Mapping[str, Sequence[Curve]], target: float, task: Task, network: str, picture: Path) -> None:
    """Held-out loss over the seconds of whole runs, mean of the seeds."""
    figure = around.figure(6.5, 2.9)
    panel = figure.subplots()
    # Colour-blind people tell them apart.
    panel.set_prop_cycle(color=["#000000", "#e69f00", "#009e73", "#0072b2", "#d55e00", "#cc79a7"])
    for name, curves in runs.items():
        seconds, losses = (np.mean([getattr(one, what) for one in curves], axis=0) for what in ("seconds", "losses"))
        panel.plot(seconds, losses, linewidth=1.8, marker="o", markersize=3, label=name)
    panel.axhline(target, color="#000000", linewidth=0.8, linestyle=":")
    panel.annotate("target", (0, target), (4, -4), ("axes fraction", "data"), "offset points", va="top", fontsize=10)
    panel.set(xlabel="seconds of training", ylabel=task.unit)
    panel.set_title(f"{task.title}, {WORKERS} hosts at {network}", loc="left", fontsize=12)
    panel.grid(color="#e5e5e5", linewidth=0.8)
    panel.legend(frameon=False)
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for action, rows in ((train, ROWS), (race, RACE)):
        command = commands.add_parser(action.__name__, help=action.__doc__)
        command.set_defaults(action=action)
        add = command.add_argument
        add("task", choices=TASKS)
        add("--rows", nargs="+", choices=rows, metavar="ROW", help="default: all of the task")
        add("--output", type=Path, default=Path("time-to-loss-output"), help="folder of the runs' logs")
        add("--timeout", type=float, default=1200, help="seconds after which a run is stopped")
        if action is race:
            hosts.add_network(add)
            add("--picture", type=Path, help="PNG to draw")
    args = parser.parse_args()
    args.action(args, Store(args.output, TASKS[args.task], args.timeout, ROWS))


if __name__ == "__main__":
    main()
