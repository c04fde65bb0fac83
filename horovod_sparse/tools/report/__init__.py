"""What was sent while training went on: a table and a picture of the logs that `StatsLog` has written.

Imports no framework.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from horovod_sparse.tools.report import table
from horovod_sparse.tools.report.log import Log, read


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
    try:
        log = read(path)
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SystemExit(f"{path} is no log of StatsLog: {error}") from error
    if not log.lines:
        raise SystemExit(
            f"{path} has no steps yet: StatsLog writes after every 10th step, or as its argument every says, of several workers"
        )
    return log
