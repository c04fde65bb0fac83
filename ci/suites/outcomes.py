"""A plugin of pytest: writes the outcome of every test, one line each, and the tests into which the exchange was put."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER, EXCHANGE = "OUTSIDE_FOLDER", "OUTSIDE_EXCHANGE"
"""The variables of the environment that say where outcomes are written, and which exchange the tests get."""
DENSE, OURS = "dense", "ours"
_RANKS = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "RANK")


def ours() -> bool:
    """Whether the tests get the exchange of this package."""
    return os.environ[EXCHANGE] == OURS


def pytest_runtest_logreport(report: Any) -> None:
    # The set-up of a test that is not skipped, and what comes after a test, count only where they fail.
    if report.when == "call" or report.outcome != "passed":
        _write("outcomes", {"test": report.nodeid, "outcome": report.outcome, "message": report.longreprtext[-3000:]})


def pytest_sessionfinish(session: Any) -> None:
    """End without an error: mpirun ends all ranks as soon as one has ended with an error."""
    session.exitstatus = 0


def note_use() -> None:
    """Write down that the exchange was put into the running test. Processes that a test starts know its name, too."""
    _write("used", {"test": os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]})


def with_compression(function: Callable[..., Any], make: Callable[[], object]) -> Callable[..., Any]:
    """The function, with a new compression where the caller gives none."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def compressed(*args: Any, **settings: Any) -> Any:
        bound = signature.bind(*args, **settings)
        if "compression" not in bound.arguments:
            bound.arguments["compression"] = make()
            note_use()
        return function(*bound.args, **bound.kwargs)

    return compressed


def _write(kind: str, line: dict[str, str]) -> None:
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
    with Path(os.environ[FOLDER], f"{kind}-{rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
