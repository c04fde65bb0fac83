"""What every rank runs: scenarios, one after the other. Each outcome is written at once, so that a hang loses none.

python -m tests.parallel.worker FRAMEWORK DIRECTORY NAMES_FILE
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from .scenario import Scenario, scenarios

SCENARIO_LIMIT = 90.0
"""Seconds; then the rank prints where it hangs and ends, and the launcher ends the others."""


def run(one: Scenario, record: TextIO, hvd: Any, seed: Callable[[int], object]) -> bool:
    """Run a scenario on this rank; return whether the ranks are still in step, so that there can be another.

    Its begin and its end are a line each of the record.
    """
    print(json.dumps({"scenario": one.name, "event": "start"}), file=record, flush=True)
    faulthandler.dump_traceback_later(SCENARIO_LIMIT, exit=True)
    began, error = time.perf_counter(), ""
    seed(0)
    try:
        one.run(*one.arguments)
    except Exception:
        error = traceback.format_exc()
    end = {"scenario": one.name, "event": "end", "error": error, "seconds": time.perf_counter() - began}
    print(json.dumps(end), file=record, flush=True)
    try:
        # A rank that has raised may have left the others in a collective: they end it when Horovod sees the stall.
        hvd.allgather_object(None, name="next_scenario")
    except Exception as error:
        # HorovodInternalError from PyTorch, an error of its own from TensorFlow.
        print(error, file=sys.stderr)
        return False
    finally:
        faulthandler.cancel_dump_traceback_later()
    gc.collect()
    # So does what a scenario has left, such as the graphs that TensorFlow has traced.
    gc.freeze()
    return True


def main(framework: str, directory: Path, names: list[str]) -> int:
    known = scenarios(framework)
    hvd = import_module("tests.parallel.ddp.ranks" if framework == "ddp" else f"horovod.{framework}")
    library = import_module("tensorflow" if framework == "tensorflow" else "torch")
    seed = library.random.set_seed if framework == "tensorflow" else library.manual_seed
    if framework == "ddp" and hvd.DEVICE == "cuda":
        import_module("tests.parallel.on_gpu").install()
    hvd.init()
    record = (directory / f"rank{hvd.rank()}.jsonl").open("a", encoding="utf-8")
    # What the frameworks have made stays: looking through it after every scenario takes longer than most scenarios.
    gc.freeze()
    for name in names:
        if not run(known[name], record, hvd, seed):
            return 3
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text(encoding="utf-8")))
    if status:
        # Horovod is down; its shutdown at exit would wait for ranks that are gone.
        sys.stdout.flush()
        os._exit(status)
