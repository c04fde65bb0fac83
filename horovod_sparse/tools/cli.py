"""The command ``horovod-sparse``. Imports no framework, so that it can say which one is missing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from horovod_sparse import __version__
from horovod_sparse.tools import check, plan, trial


def _check(_: argparse.Namespace) -> int:
    findings = check.findings()
    for finding in findings:
        print(finding)
    missing = {finding.what for finding in findings if finding.mark == "missing"}
    found = {finding.what for finding in findings}
    ways = {way: needed for way, needed in check.WAYS.items() if found.issuperset(needed)}
    lacking = {way: [what for what in needed if what in missing] for way, needed in ways.items()}
    for way, lines in lacking.items():
        print(f"{way} cannot run: {', '.join(lines)}" if lines else f"{way} can run.")
    return 1 if all(lacking.values()) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status."""
    parser = argparse.ArgumentParser(prog="horovod-sparse", description="Gradient sparsification for Horovod.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "say what this machine can do, and what to install; exit status 0 if a way of training can run"
    commands.add_parser("check", help=text, description=text).set_defaults(run=_check)
    text = "time steps with dense and sparse exchanges, under mpirun, horovodrun or torchrun, and say what to use"
    tried = commands.add_parser("try", help=text, description=text)
    trial.add_arguments(tried)
    tried.set_defaults(run=trial.run)
    text = "predict how long each exchange of gradients takes on a network, without training"
    planned = commands.add_parser("plan", help=text, description=text)
    plan.add_arguments(planned)
    planned.set_defaults(run=plan.run)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
