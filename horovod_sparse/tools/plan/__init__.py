"""Which exchange is the fastest on a network: bytes and time of a step's communication, predicted. Imports no framework."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from horovod_sparse.tools.options import quantity
from horovod_sparse.tools.plan import report
from horovod_sparse.tools.plan.methods import MOST_WORKERS
from horovod_sparse.tools.plan.network import LATENCY, Network
from horovod_sparse.tools.quantities import parse_bandwidth, parse_count, parse_latency


def _workers(name: str, text: str) -> int:
    workers = int(text) if text.isdecimal() and len(text) <= len(str(MOST_WORKERS)) else 0
    if not 2 <= workers <= MOST_WORKERS:
        raise ValueError(f"{name} must be an int in [2, {MOST_WORKERS}], such as 64, got {text!r}")
    return workers


def _ratio(name: str, text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"{name} must be in (0, 1], such as 0.001, got {text!r}")
    return ratio


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--parameters", type=quantity(parse_count, "parameters"), required=True, metavar="N", help="as 25.6M or 350k")
    add("--workers", type=quantity(_workers, "workers"), required=True, metavar="N", help="at least 2")
    bandwidth = "of a worker in each direction, as 10gbit or 1.2GB"
    add("--bandwidth", type=quantity(parse_bandwidth, "bandwidth"), required=True, metavar="RATE", help=bandwidth)
    latency = f"of a message, as 50us or 0.1ms; default: {1e6 * LATENCY:g}us"
    add("--latency", type=quantity(parse_latency, "latency"), default=LATENCY, metavar="TIME", help=latency)
    add("--ratio", type=quantity(_ratio, "ratio"), default=0.001, help="of the entries that are sent; default: 0.001")
    add("--picture", type=Path, metavar="FILE.png", help="draw the time against the number of workers")


def run(arguments: argparse.Namespace) -> int:
    """Predict, print the results, and return the exit status."""
    if arguments.picture is not None and find_spec("matplotlib") is None:
        raise SystemExit("--picture needs matplotlib, which is not installed: pip install matplotlib")
    where, workers = Network(arguments.latency, arguments.bandwidth), arguments.workers
    print(report.text(where, arguments.parameters, arguments.ratio, workers))
    if arguments.picture is not None:
        report.draw(where, arguments.parameters, arguments.ratio, workers, arguments.picture)
    return 0
