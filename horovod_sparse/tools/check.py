"""Check whether this machine can train with sparse gradients and, if not, what to do about it. Imports no framework.

The checks run in other processes, as `python -m horovod_sparse.tools.check PROCESS`. So a library that is broken, or crashes
or hangs while it is imported, only gives a line of the report.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections import ChainMap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal

from horovod_sparse import kernels

Mark = Literal["ok", "missing", "warn"]
"""The result: "missing" marks what some of `WAYS` cannot do without, "warn" marks other problems."""
HOROVOD_VERSION = "0.28.1"
_REBUILD = "build Horovod: make setup, or docker/build_horovod.sh PYTHON"
_INSTALL_MPI = f"install libopenmpi-dev, then {_REBUILD}"
_SETS = ("sse4_2", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "asimd", "sve", "sve2")
"""The instruction sets that tell a processor's generation."""
_MARK = "horovod_sparse.check:"
"""A line of output that begins with this holds a finding."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    mark: Mark
    what: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        advice = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.mark:<8} {self.what:<20} {self.detail}{advice}"


@dataclass(frozen=True)
class Line:
    """One check, and the finding if it fails."""

    what: str
    process: str
    """Checks with the same name share a process, and run there in order: so a slow import is made once."""
    find: Callable[[], str | Finding]
    """Returns the detail of a finding that is "ok", or another finding. If it raises, the check has failed."""
    mark: Mark
    remedy: str
    detail: str = ""
    """The detail if the check fails, instead of the error."""

    def finding(self) -> Finding:
        try:
            found = self.find()
        except Exception as error:  # a broken library may raise anything
            return self.failed(f"{type(error).__name__}: {_last_line(str(error))}")
        return Finding("ok", self.what, found) if isinstance(found, str) else found

    def failed(self, error: str) -> Finding:
        return Finding(self.mark, self.what, self.detail or error, self.remedy)


_PYTHONS = "use Python 3.10 to 3.13, or 3.14 without TensorFlow"


def _python() -> str | Finding:
    version = platform.python_version()
    if (3, 10) <= sys.version_info[:2] <= (3, 14):
        return version
    return Finding("warn", "python", f"{version} is untested", _PYTHONS)


def _version(library: str) -> str:
    return str(import_module(library).__version__)


def _torch() -> str:
    torch = import_module("torch")
    return f"{torch.__version__}, {'with a CUDA device' if torch.cuda.is_available() else 'CPU'}"


def _horovod() -> str | Finding:
    version = metadata.version("horovod")
    if version.split("+")[0] == HOROVOD_VERSION:
        return version
    return Finding("warn", "horovod", f"{version}; {HOROVOD_VERSION} is tested", _REBUILD)


def _imported(module: str, detail: str = "") -> str:
    # Importing an adapter of this package checks the installed Horovod.
    import_module(module)
    return detail or f"{module} extends the installed Horovod"


def _ddp() -> str | Finding:
    import_module("horovod_sparse.torch")
    if import_module("torch.distributed").is_available():
        return "torch.distributed"
    return Finding("missing", "DDP", "torch was built without torch.distributed", "install another build of torch")


def _seam() -> str:
    # Without Horovod, the adapter is imported without its seam.
    import_module("horovod.torch")
    return _imported("horovod_sparse.torch")


def _controllers() -> str | Finding:
    hvd = import_module("horovod.torch")
    found = [name for name, built in (("MPI", hvd.mpi_built()), ("Gloo", hvd.gloo_built())) if built]
    if not found:
        return Finding("missing", "controllers", "neither MPI nor Gloo", _INSTALL_MPI)
    if "MPI" not in found:
        return Finding("warn", "controllers", "Gloo, without MPI", f"for mpirun, {_INSTALL_MPI}")
    return ", ".join(found)


def _gpu_operations() -> str | Finding:
    if import_module("horovod.torch").nccl_built():
        return "NCCL"
    if import_module("torch").cuda.is_available():
        return Finding("warn", "GPU operations", "none, but there is a CUDA device", f"HOROVOD_GPU=1: {_REBUILD}")
    return "none, and no CUDA device"


def _program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    path = str(beside) if beside.exists() else shutil.which(name) or name
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip().splitlines()[0].strip()


def _mpi4py() -> str:
    # Asking for the version must not start MPI, which some clusters forbid outside a job.
    import_module("mpi4py").rc.initialize = False
    library = import_module("mpi4py.MPI").Get_library_version().split(",")[0].strip()
    return f"{_version('mpi4py')}, {library}"


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


def _kernels() -> str | Finding:
    sets = f"this processor has {', '.join(instruction_sets()) or 'unknown instruction sets'}"
    unset = f"unset {kernels.VARIABLE}"
    if not kernels.compiled():
        return Finding("warn", "kernels", "not compiled: framework operations are used", "install g++ and reinstall")
    try:
        variant = kernels.variant()
    except ValueError as error:
        return Finding("missing", "kernels", str(error), unset)
    if variant == "off":
        return Finding("warn", "kernels", f"turned off: framework operations are used; {sets}", unset)
    if variant != kernels.variants()[0]:
        return Finding("warn", "kernels", f"{variant}, and {kernels.variants()[0]} is faster; {sets}", unset)
    return f"{variant}; {sets}"


_FOR_TF = "only for TensorFlow:"
_TF_INSTALL = f"{_FOR_TF} pip install tensorflow-cpu, then {_REBUILD}"
_TF_FIRST = f"{_FOR_TF} settle its lines above; needs Horovod {HOROVOD_VERSION}"
_ALL_FIRST = f"settle the lines above first; this needs Horovod {HOROVOD_VERSION}"
_TORCH_FIRST = "settle horovod for torch first"
_ABSENT = "not found or not working"
_GLOO = "install openmpi-bin, or start with horovodrun --gloo"
LINES = (
    Line("python", "host", _python, "warn", _PYTHONS),
    Line("numpy", "numpy", partial(_version, "numpy"), "missing", "pip install numpy"),
    Line("torch", "torch", _torch, "missing", f"pip install torch, then {_REBUILD}"),
    Line("tensorflow", "tf", partial(_version, "tensorflow"), "missing", _TF_INSTALL),
    Line("horovod", "host", _horovod, "missing", _REBUILD, "not installed"),
    Line("horovod for torch", "torch", partial(_imported, "horovod.torch", "compiled"), "missing", _REBUILD),
    Line(
        "horovod for tf", "tf", partial(_imported, "horovod.tensorflow", "compiled"), "missing", f"{_FOR_TF} {_REBUILD}"
    ),
    Line("controllers", "torch", _controllers, "missing", _TORCH_FIRST, "unknown"),
    Line("GPU operations", "torch", _gpu_operations, "warn", _TORCH_FIRST, "unknown"),
    Line("mpirun", "host", partial(_program, "mpirun"), "warn", _GLOO, _ABSENT),
    Line("horovodrun", "host", partial(_program, "horovodrun"), "warn", f"{_REBUILD}, or start with mpirun", _ABSENT),
    Line("mpi4py", "numpy", _mpi4py, "missing", "only for NumPy arrays over MPI: pip install 'mpi4py>=4'"),
    Line("DDP", "torch", _ddp, "missing", "settle torch first"),
    Line("seam", "torch", _seam, "missing", _ALL_FIRST),
    Line("seam for tf", "tf", partial(_imported, "horovod_sparse.tensorflow"), "missing", _TF_FIRST),
    Line("kernels", "host", _kernels, "warn", f"unset {kernels.VARIABLE}"),
)

WAYS = {
    "torch with Horovod": ("numpy", "torch", "horovod", "horovod for torch", "controllers", "seam", "kernels"),
    "torch with DistributedDataParallel": ("numpy", "torch", "DDP", "kernels"),
    "TensorFlow with Horovod": ("numpy", "tensorflow", "horovod", "horovod for tf", "seam for tf", "kernels"),
    "NumPy over MPI": ("numpy", "mpi4py", "kernels"),
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
    told = [json.loads(line.removeprefix(_MARK)) for line in output.splitlines() if line.startswith(_MARK)]
    # After a crash or a hang, the checks that had not answered yet have failed.
    failed = {line.what: line.failed(death) for line in LINES if line.process == process}
    return failed | {finding["what"]: Finding(**finding) for finding in told}


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


if __name__ == "__main__":
    for checked in LINES:
        if checked.process == sys.argv[1]:
            print("\n" + _MARK + json.dumps(asdict(checked.finding())), flush=True)
