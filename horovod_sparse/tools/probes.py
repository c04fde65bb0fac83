"""Ask libraries about themselves, in a separate process.

``python -m horovod_sparse.tools.probes NAME...`` prints one line of JSON for each name. If a library is missing or broken, or
crashes or hangs while it is imported, the caller only gets an error text. This module imports a library only when asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

_MARK = "horovod_sparse.probe:"


@dataclass(frozen=True)
class Answer:
    """What a probe found: ``facts`` when the library works, else a one-line ``error``."""

    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def works(self) -> bool:
        """True if the library could be imported and asked."""
        return not self.error


def _numpy() -> dict[str, Any]:
    import numpy

    return {"version": numpy.__version__}


def _torch() -> dict[str, Any]:
    import torch

    return {"version": torch.__version__, "cuda": torch.cuda.is_available()}


def _tensorflow() -> dict[str, Any]:
    import tensorflow

    return {"version": tensorflow.__version__}


def _horovod_torch() -> dict[str, Any]:
    import horovod.torch as hvd

    return {
        "controllers": [name for name, built in (("MPI", hvd.mpi_built()), ("Gloo", hvd.gloo_built())) if built],
        "nccl": bool(hvd.nccl_built()),
    }


def _horovod_tensorflow() -> dict[str, Any]:
    import horovod.tensorflow as hvd

    return {"built": bool(hvd.mpi_built() or hvd.gloo_built())}


def _mpi4py() -> dict[str, Any]:
    import mpi4py

    # Asking for the version must not start MPI, which some clusters forbid outside a job.
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return {"version": mpi4py.__version__, "library": MPI.Get_library_version().split(",")[0].strip()}


def _tensorflow_seam() -> dict[str, Any]:
    # Importing it checks the installed Horovod.
    import_module("horovod_sparse.tensorflow")
    return {}


def _seam() -> dict[str, Any]:
    # Importing it checks the installed Horovod.
    import_module("horovod_sparse.torch")
    return {}


_PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "numpy": _numpy,
    "mpi4py": _mpi4py,
    "torch": _torch,
    "horovod_torch": _horovod_torch,
    "seam": _seam,
    "tensorflow": _tensorflow,
    "horovod_tensorflow": _horovod_tensorflow,
    "tensorflow_seam": _tensorflow_seam,
}

# Each group runs in one process. Probes that need the same slow import share a process; the likeliest to work comes first.
GROUPS = (
    ("numpy", "mpi4py"),
    ("torch", "horovod_torch", "seam"),
    ("tensorflow", "horovod_tensorflow", "tensorflow_seam"),
)


def ask(names: Sequence[str], timeout: float = 60.0) -> dict[str, Answer]:
    """Run the probes `names` in one new process, in order, and wait for them, at most `timeout` seconds in all."""
    command = [sys.executable, "-m", "horovod_sparse.tools.probes", *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
        death = f"gave no answer within {timeout:g} s"
    else:
        output = done.stdout
        death = _last_line(done.stderr) or f"ended with exit status {done.returncode}"
    answers = {}
    for line in output.splitlines():
        if line.startswith(_MARK):
            name, facts, error = json.loads(line.removeprefix(_MARK))
            answers[name] = Answer(facts, error)
    # After a crash or a hang, the probes that had not answered yet get the same error.
    return {name: answers.get(name, Answer(error=death)) for name in names}


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _answer(name: str) -> str:
    try:
        return json.dumps([name, _PROBES[name](), ""])
    except Exception as error:  # a broken library may raise anything
        return json.dumps([name, {}, f"{type(error).__name__}: {_last_line(str(error))}"])


if __name__ == "__main__":
    for probe in sys.argv[1:]:
        print("\n" + _MARK + _answer(probe), flush=True)
