"""Check whether this machine can train with sparse gradients. Libraries are imported in other processes: one may crash.

Tested by tests/tools/test_cli.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from horovod_sparse import kernels

_SETS = ("sse4_2", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "asimd", "sve", "sve2")
"""The instruction sets that tell a processor's generation."""
_PATIENCE = 150.0
"""Seconds that a library may take."""


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


def _imported(statements: str, detail: str) -> str:
    """Return the value of the expression `detail` after some statements, in another process. Raise RuntimeError if it fails."""
    command = [sys.executable, "-c", f"{statements}\nprint({detail})"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired as expired:
        raise RuntimeError(f"gave no answer within {_PATIENCE:g} s") from expired
    *_, last = ["", *(done.stderr if done.returncode else done.stdout).strip().splitlines()]
    if done.returncode:
        raise RuntimeError(last or f"ended with exit status {done.returncode}")
    return last


def _horovod(framework: str) -> str:
    # Importing the adapter checks the installed Horovod.
    statements = f"import horovod, horovod.{framework} as hvd, horovod_sparse.{framework}"
    built = ", ".join(f"'{name}' * hvd.{name}_built()" for name in ("mpi", "gloo", "nccl"))
    return _imported(statements, f"horovod.__version__ + ', with ' + ', '.join(filter(None, ({built})))")


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
    if not fastest:
        raise UserWarning("not compiled: framework operations are used")
    told = f"{variant}; this processor has {', '.join(instruction_sets()) or 'unknown instruction sets'}"
    if variant not in fastest:
        raise UserWarning(f"{told}; {fastest[0]} is faster")
    return told


_TORCH = "torch.__version__ + (', with a CUDA device' if torch.cuda.is_available() else ', CPU')"
# A build without torch.distributed lacks what this imports.
_DDP = "import horovod_sparse.torch, torch.distributed.distributed_c10d"
# Asking for the version must not start MPI, which some clusters forbid outside a job.
_MPI = "import mpi4py\nmpi4py.rc.initialize = False\nfrom mpi4py import MPI"
_HOROVOD = "build Horovod 0.28.1: make setup, or tools/build_horovod.sh PYTHON"
_TENSORFLOW = "only for TensorFlow: pip install tensorflow-cpu"
_VERSION = "MPI.Get_library_version().split(',')[0].strip()"
LINES: dict[str, tuple[Callable[[], str], str]] = {
    "torch": (partial(_imported, "import torch", _TORCH), "pip install torch"),
    "DDP": (partial(_imported, _DDP, "'torch.distributed'"), "settle torch first"),
    "horovod for torch": (partial(_horovod, "torch"), _HOROVOD),
    "tensorflow": (partial(_imported, "import tensorflow", "tensorflow.__version__"), _TENSORFLOW),
    "horovod for tf": (partial(_horovod, "tensorflow"), f"only for TensorFlow: {_HOROVOD}"),
    "mpi4py": (partial(_imported, _MPI, _VERSION), "only for NumPy arrays over MPI: pip install 'mpi4py>=4'"),
    "mpirun": (partial(_program, "mpirun"), "install openmpi-bin, or start with horovodrun --gloo"),
    "horovodrun": (partial(_program, "horovodrun"), f"{_HOROVOD}, or start with mpirun"),
    "kernels": (_kernels, f"install g++ and reinstall, unset {kernels.VARIABLE}"),
}
"""What returns the detail of a line that is "ok", and a remedy. UserWarning stands for "warn", other errors for "missing"."""

WAYS = {
    "torch with Horovod": ("torch", "horovod for torch", "kernels"),
    "torch with DistributedDataParallel": ("torch", "DDP", "kernels"),
    "TensorFlow with Horovod": ("tensorflow", "horovod for tf", "kernels"),
    "NumPy over MPI": ("mpi4py", "kernels"),
}
"""The ways of training, and the lines that must not be ``missing`` for each."""


_OF = {
    "torch": ("torch", "DDP", "horovod for torch"),
    "tensorflow": ("tensorflow", "horovod for tf"),
    "mpi4py": ("mpi4py",),
}
"""What can be trained with, and the lines that are about it alone."""


def present() -> list[str]:
    """Return the lines about what is installed; all if nothing is that can be trained with."""
    absent = [lines for package, lines in _OF.items() if find_spec(package) is None]
    if len(absent) == len(_OF):
        return [*LINES]
    return [what for what in LINES if not any(what in lines for lines in absent)]


def finding(what: str) -> Finding:
    """Check what one of `LINES` names."""
    find, remedy = LINES[what]
    try:
        return Finding("ok", what, find())
    except UserWarning as problem:
        return Finding("warn", what, str(problem), remedy)
    except (RuntimeError, ValueError) as error:
        return Finding("missing", what, str(error), remedy)


def findings() -> list[Finding]:
    """Run the checks of what is installed, and return one finding for each."""
    with ThreadPoolExecutor(len(LINES)) as pool:
        return [*pool.map(finding, present())]
