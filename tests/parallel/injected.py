"""Faults that one rank of a job is given on purpose, and how the job ended. Imports no framework."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.launch import Ended, Launch

from .scenario import GLOO_2, MPI_2, TF_2, TF_GLOO_2

VICTIM = 1
"""The rank that has the fault."""
STATUS = 7
"""With which `os._exit` ends it."""
FAULTY_STEP = 3
STEPS = 1000
"""More than anybody makes before the job ends."""
LIMIT = 240.0
"""Seconds for a whole launch. An idle machine needs a tenth."""

MOMENTS = {
    "hook": "in a gradient's hook, during backward",
    "exchange": "after a bucket was selected, before its exchange begins",
    "synchronize": "while the others wait in `synchronize`",
    "optimizer": "in the optimizer's `step`, after the reduction",
    "agreement": "in the first step, before the ranks compare their settings",
}


@dataclass
class Fault:
    """What happens to one rank, and where."""

    moment: str
    """A key of `MOMENTS`."""
    action: str
    """A key of `ACTIONS`."""
    framework: str = "torch"
    armed: bool = False
    """Whether it happens now, on this rank."""

    def __str__(self) -> str:
        return f"{'' if self.framework == 'torch' else 'tensorflow-'}{self.moment}-{self.action}"

    @property
    def text(self) -> str:
        """What the rank says, if it can."""
        return f"a fault in {self.moment}"

    def happen(self) -> None:
        """Let it happen to the process that calls this, if it is armed."""
        if not self.armed:
            return
        # The launcher's output is a pipe. A line that is not flushed would be lost with the process.
        print(f"the fault is at {time.time():.3f}", flush=True)
        ACTIONS[self.action](self)
        raise AssertionError("the process lives")


def _raise(fault: Fault) -> None:
    raise RuntimeError(fault.text)


ACTIONS: dict[str, Callable[[Fault], object]] = {
    "raise": _raise,
    "exit": lambda fault: sys.exit(fault.text),
    "_exit": lambda fault: os._exit(STATUS),
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
}

SHOWN = {"raise": "`raise`", "exit": "`sys.exit(text)`", "_exit": f"`os._exit({STATUS})`", "kill": "SIGKILL"}
"""How a page shows the actions."""

FAULTS = [
    Fault("hook", "raise"),
    Fault("hook", "kill"),
    Fault("exchange", "raise"),
    Fault("exchange", "_exit"),
    Fault("synchronize", "exit"),
    Fault("synchronize", "kill"),
    Fault("optimizer", "raise"),
    Fault("optimizer", "exit"),
    Fault("agreement", "raise"),
    Fault("agreement", "_exit"),
    Fault("exchange", "raise", "tensorflow"),
    Fault("optimizer", "kill", "tensorflow"),
    Fault("agreement", "exit", "tensorflow"),
]

LAUNCHES = {"torch": (MPI_2, GLOO_2), "tensorflow": (TF_2, TF_GLOO_2)}


@dataclass(frozen=True)
class Outcome:
    """How a launch with a fault ended."""

    ended: Ended
    seconds: float | None
    """From the fault to the end of the launch; None if the fault did not happen."""

    def says(self, fault: Fault) -> bool:
        """Whether what was printed tells the first cause."""
        return re.search(_ENDS.get(fault.action, fault.text), self.ended.output) is not None


_ENDS = {"_exit": rf"Exit code: *{STATUS}\b", "kill": r"exited on\s+signal 9\b|Exit code: *(137|-9)\b"}
"""What mpirun or horovodrun says of a process that could say nothing."""


def run(launch: Launch, fault: Fault) -> Outcome:
    """Start a job, in which one rank has the fault, and wait for its end."""
    module = "tests.parallel.faults" if fault.framework == "torch" else "tests.parallel.tf.faults"
    # Without Horovod's own end of stalls: the job has to end because of the fault.
    environment = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("-m", module, fault.moment, fault.action, folder)
        ended = launch.run(*arguments, limit=LIMIT, environment=environment)
        now = time.time()
    found = re.search(r"the fault is at (\d+\.\d+)", ended.output)
    return Outcome(ended, now - float(found[1]) if found else None)


def before(owner: Any, name: str, act: Callable[[], object]) -> None:
    """Do something before a function of the package is called."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        act()
        return function(*args, **kwargs)

    setattr(owner, name, call)


def wait_for(file: Path) -> None:
    """Wait until another rank has made a file."""
    until = time.monotonic() + LIMIT
    while not file.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"nobody has made {file}")
        time.sleep(0.01)
