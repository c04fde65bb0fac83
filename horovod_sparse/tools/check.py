"""Check whether this machine can train with sparse gradients and, if not, what to do about it. Imports no framework.

The checks run in other processes, as `python -m horovod_sparse.tools.check PROCESS`. So a library that is broken, or crashes
or hangs while it is imported, only gives a line of the report.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import ChainMap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

from horovod_sparse import kernels

_SETS = ("sse4_2", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "asimd", "sve", "sve2")
"""The instruction sets that tell a processor's generation."""
_MARK = "horovod_sparse.check:"
"""A line of output that begins with this holds a finding."""


class Finding(NamedTuple):
    """One line of the report."""

    mark: Literal["ok", "missing", "warn"]
    """ "missing" marks what some of `WAYS` cannot do without, "warn" marks other problems."""
    what: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        advice = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.mark:<8} {self.what:<20} {self.detail}{advice}"


class Line(NamedTuple):
    """One check."""

    what: str
    process: str
    """Checks with the same name share a process, and run there in order: so a slow import is made once."""
    find: Callable[[], str]
    """Returns the detail of a finding that is "ok". Raises UserWarning for "warn", any other error for "missing"."""
    remedy: str

    def finding(self) -> Finding:
        try:
            return Finding("ok", self.what, self.find())
        except UserWarning as problem:
            return Finding("warn", self.what, str(problem), self.remedy)
        except Exception as error:  # a broken library may raise anything
            return self.missing(f"{type(error).__name__}: {_last_line(str(error))}")

    def missing(self, problem: str) -> Finding:
        return Finding("missing", self.what, problem, self.remedy)


def _torch() -> str:
    torch = import_module("torch")
    return f"{torch.__version__}, {'with a CUDA device' if torch.cuda.is_available() else 'CPU'}"


def _ddp() -> str:
    import_module("horovod_sparse.torch")
    # A build without torch.distributed lacks what this imports.
    import_module("torch.distributed.distributed_c10d")
    return "torch.distributed"


def _horovod(framework: str) -> str:
    hvd = import_module(f"horovod.{framework}")
    # Importing the adapter checks the installed Horovod.
    import_module(f"horovod_sparse.{framework}")
    built = [name for name in ("mpi", "gloo", "nccl") if getattr(hvd, f"{name}_built")()]
    return f"{import_module('horovod').__version__}, with {', '.join(built)}"


def _tensorflow() -> str:
    return str(import_module("tensorflow").__version__)


def _mpi4py() -> str:
    # Asking for the version must not start MPI, which some clusters forbid outside a job.
    import_module("mpi4py").rc.initialize = False
    return str(import_module("mpi4py.MPI").Get_library_version()).split(",")[0].strip()


def _program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UserWarning("not found")
    return found


def cpu_info(name: str) -> str:
    """Return what Linux says under this name of the first processor; an empty string if nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


def instruction_sets() -> list[str]:
    """Return the names in `_SETS` that this processor has."""
    # AArch64 lists them under "Features".
    flags = (cpu_info("flags") or cpu_info("Features")).split()
    return [name for name in _SETS if name in flags]


def _kernels() -> str:
    variant, fastest = kernels.variant(), kernels.variants()[:1]
    if not kernels.compiled():
        raise UserWarning("not compiled: framework operations are used")
    told = f"{variant}; this processor has {', '.join(instruction_sets()) or 'unknown instruction sets'}"
    if variant not in fastest:
        raise UserWarning(f"{told}; {fastest[0]} is faster")
    return told


_HOROVOD = "build Horovod 0.28.1: make setup, or docker/build_horovod.sh PYTHON"
LINES = (
    Line("torch", "torch", _torch, "pip install torch"),
    Line("DDP", "torch", _ddp, "settle torch first"),
    Line("horovod for torch", "torch", partial(_horovod, "torch"), _HOROVOD),
    Line("tensorflow", "tf", _tensorflow, "only for TensorFlow: pip install tensorflow-cpu"),
    Line("horovod for tf", "tf", partial(_horovod, "tensorflow"), f"only for TensorFlow: {_HOROVOD}"),
    Line("mpi4py", "mpi", _mpi4py, "only for NumPy arrays over MPI: pip install 'mpi4py>=4'"),
    Line("mpirun", "host", partial(_program, "mpirun"), "install openmpi-bin, or start with horovodrun --gloo"),
    Line("horovodrun", "host", partial(_program, "horovodrun"), f"{_HOROVOD}, or start with mpirun"),
    Line("kernels", "host", _kernels, f"install g++ and reinstall, unset {kernels.VARIABLE}"),
)

WAYS = {
    "torch with Horovod": ("torch", "horovod for torch", "kernels"),
    "torch with DistributedDataParallel": ("torch", "DDP", "kernels"),
    "TensorFlow with Horovod": ("tensorflow", "horovod for tf", "kernels"),
    "NumPy over MPI": ("mpi4py", "kernels"),
}
"""The ways of training, and the lines that must not be ``missing`` for each."""


def findings() -> list[Finding]:
    """Run all checks, and return one finding for each."""
    processes = dict.fromkeys(line.process for line in LINES)
    with ThreadPoolExecutor(len(processes)) as pool:
        found = ChainMap(*pool.map(ask, processes))
    return [found[line.what] for line in LINES]


def ask(process: str, timeout: float = 60.0) -> dict[str, Finding]:
    """Run the checks that share a process, and wait at most `timeout` seconds. Return the findings by `what`."""
    command = [sys.executable, "-m", "horovod_sparse.tools.check", process]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
        death = f"gave no answer within {timeout:g} s"
    else:
        output = done.stdout
        death = _last_line(done.stderr) or f"ended with exit status {done.returncode}"
    told = [Finding(*json.loads(line.removeprefix(_MARK))) for line in output.splitlines() if line.startswith(_MARK)]
    # After a crash or a hang, the checks that had not answered yet have failed.
    missing = {line.what: line.missing(death) for line in LINES if line.process == process}
    return missing | {finding.what: finding for finding in told}


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


if __name__ == "__main__":
    for checked in LINES:
        if checked.process == sys.argv[1]:
            print("\n" + _MARK + json.dumps(checked.finding()), flush=True)
