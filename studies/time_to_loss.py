"""How long each way to exchange gradients takes to reach the same held-out loss, with the learning rate tuned for each alike.

    python studies/time_to_loss.py train charlm
    sudo .venv/bin/python studies/time_to_loss.py time charlm --rate 1gbit
    sudo .venv/bin/python studies/time_to_loss.py race charlm --rate 1gbit
    python studies/time_to_loss.py report charlm --picture docs/time-to-loss.png

`train` finds each row's learning rate, the best of the task's for one seed, and trains three seeds with it, on local workers.
The loss over steps does not depend on the network. `time` measures the time of a step of the same program on two hosts, which
are network namespaces of this machine, in short runs in turns; nothing else may run meanwhile. The time to the target is the
product of both. `report` prints the tables. `race` compares the plain line, with the learning rate of dense training: it trains
from beginning to end on the hosts, because the warm-up's steps take longer than the others.

Every run leaves a file in the output folder and is not repeated while the file is there.
"""

from __future__ import annotations

import argparse
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import around  # noqa: F401  (the examples and the benchmarks can be imported after it)
import hosts
import loss_report
import machine
from loss_runs import DENSE, RACE, ROWS, SEEDS, TASKS, Curve, MissingRunError, Store, rows_of

HOSTS = 2


def train(args: argparse.Namespace, store: Store) -> None:
    """Train what is not there yet."""
    for name in [row for row in args.rows if not ROWS[row].same_curve]:
        rate, losses = store.tuned(name)
        print(f"{name}: {', '.join(f'{loss:.3f} at {tried:g}' for tried, loss in losses.items())}", flush=True)
        ends = ", ".join(f"{curve.last:.3f}" for curve in store.curves(name))
        print(f"{name}: rate {rate:g}, each seed {ends}", flush=True)


def time(args: argparse.Namespace, store: Store) -> None:
    """Measure the steps of all rows that are trained, in turns."""
    need_hosts()
    found, missing = loss_report.results(store, args.rows)
    if missing:
        print(f"not trained, so not timed: {', '.join(missing)}", file=sys.stderr, flush=True)
    with hosts.cluster(HOSTS, args.network) as where:
        for number in range(args.rounds):
            for name in found:
                timing = store.time(where, args.network, name, number)
                print(f"{name}, run {number}: {1e3 * timing.seconds:.1f} ms", file=sys.stderr, flush=True)


def race(args: argparse.Namespace, store: Store) -> None:
    """Train each row from beginning to end on the hosts, all with the learning rate that is dense fp32's best."""
    need_hosts()
    target, (rate, _) = store.target(), store.tuned(DENSE)
    runs: dict[str, list[Curve]] = {name: [] for name in args.rows}
    with hosts.cluster(HOSTS, args.network) as where:
        # In turns, so that what else happens on the machine concerns all rows.
        for seed in SEEDS:
            for name, curves in runs.items():
                curves.append(store.whole(where, args.network, name, rate, seed))
                print(
                    f"{name}, seed {seed}: {curves[-1].reached(target, curves[-1].seconds)} s",
                    file=sys.stderr,
                    flush=True,
                )
    print(f"{machine.describe()}; two hosts at {args.network}, learning rate {rate:g}, target {target:.3f}\n")
    print(loss_report.race_table(runs, target))
    if args.picture is not None:
        loss_report.draw_race(runs, target, store.task, args.network, args.picture)


def report(args: argparse.Namespace, store: Store) -> None:
    """Print the tables, of what is there, and draw the picture."""
    found, missing = loss_report.results(store, args.rows)
    target = store.target()
    print(f"{machine.describe()}, Python {platform.python_version()}, PyTorch {version('torch')}\n")
    print(loss_report.page(store, found, target))
    if missing:
        print(f"\nNot trained: {', '.join(missing)}.")
    if args.picture is not None:
        loss_report.draw(store, found, target, args.picture)


def need_hosts() -> None:
    reason = hosts.missing()
    if reason:
        raise SystemExit(f"no hosts can be made here: {reason}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for action in (train, time, race, report):
        command = commands.add_parser(action.__name__, help=action.__doc__)
        command.set_defaults(action=action)
        add = command.add_argument
        add("task", choices=TASKS)
        rows = list(RACE) if action is race else None
        add("--rows", nargs="+", choices=[*ROWS, *RACE], default=rows, metavar="ROW", help="default: all of the task")
        add("--output", type=Path, default=Path("time-to-loss-output"), help="folder of the runs' files")
        add("--timeout", type=float, default=1200, help="seconds after which a run is stopped")
        if action in (time, race):
            add("--rate", dest="network", default="1gbit", help="of every host's network card, as tc writes it")
        if action is time:
            add("--rounds", type=int, default=2, help="runs of each row")
        if action in (race, report):
            add("--picture", type=Path, help="PNG to draw")
    args = parser.parse_args(arguments)
    args.rows = args.rows or rows_of(args.task)
    return args


def main() -> None:
    args = parse()
    store = Store(args.output, args.task, trains=args.action is train, timeout=args.timeout)
    try:
        args.action(args, store)
    except MissingRunError as error:
        raise SystemExit(f"{error}: run `train` first") from error


if __name__ == "__main__":
    main()
