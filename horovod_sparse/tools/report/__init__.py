"""What was sent while training went on: a table and a picture of the logs that `StatsLog` has written.

Imports no framework.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from horovod_sparse.tools.report import table
from horovod_sparse.tools.report.log import Log, printable, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="a file of StatsLog, such as stats.jsonl")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw ratio, threshold, bytes and so on")


def run(arguments: argparse.Namespace) -> int:
    """Read the logs, print the table, write what was asked for, and return the exit status."""
    if arguments.picture is not None and find_spec("matplotlib") is None:
        raise SystemExit("--picture needs matplotlib, which is not installed: pip install matplotlib")
    logs = [_read(path) for path in arguments.logs]
    print(table.text(logs))
    if arguments.picture is not None:
        from horovod_sparse.tools.report import picture

        picture.save(logs, arguments.picture)
    return 0


def _read(path: Path) -> Log:
    name = printable(str(path))
    try:
        log = read(path)
    except OSError as error:
        raise SystemExit(f"{name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SystemExit(f"{name} is no log of StatsLog: {error}") from error
    if log.incomplete:
        print(f"{name}: the last line is incomplete, as a killed run leaves it, and is left out", file=sys.stderr)
    if not log.lines:
        raise SystemExit(
            f"{name} has no steps yet: StatsLog writes after every 10th step, or as its argument every says, of several workers"
        )
    return log
