"""Check whether this machine can train with sparse gradients and, if not, what to do about it. Imports no framework."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from horovod_sparse import kernels
from horovod_sparse.tools import probes
from horovod_sparse.tools.machine import instruction_sets

HOROVOD_VERSION = "0.28.1"
_REBUILD = "build Horovod: make setup, or docker/build_horovod.sh PYTHON"


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``missing`` marks what torch training cannot do without; ``warn`` marks other problems."""

    mark: Literal["ok", "missing", "warn"]
    what: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        """Return the line as it is printed."""
        advice = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.mark:<8} {self.what:<20} {self.detail}{advice}"


@dataclass(frozen=True)
class Machine:
    """The facts that ``judge`` judges. ``programs``: the first line of each launcher's ``--version``, or None."""

    answers: Mapping[str, probes.Answer]
    programs: Mapping[str, str | None]
    horovod: str | None


def inspect() -> Machine:
    """Ask every library and program at once. This takes as long as the slowest import."""
    programs = ("mpirun", "horovodrun")
    with ThreadPoolExecutor() as pool:
        groups = [pool.submit(probes.ask, group) for group in probes.GROUPS]
        lines = {name: pool.submit(_version_line, name) for name in programs}
        return Machine(
            answers={name: answer for group in groups for name, answer in group.result().items()},
            programs={name: line.result() for name, line in lines.items()},
            horovod=_installed("horovod"),
        )


def _version_line(program: str) -> str | None:
    beside = Path(sys.executable).with_name(program)
    path = str(beside) if beside.exists() else shutil.which(program)
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), "").strip() or None


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _python(_: Machine) -> Finding:
    version = platform.python_version()
    if (3, 10) <= sys.version_info[:2] <= (3, 12):
        return Finding("ok", "python", version)
    return Finding("warn", "python", f"{version} is untested", "use Python 3.10 to 3.12")


def _numpy(machine: Machine) -> Finding:
    answer = machine.answers["numpy"]
    if answer.works:
        return Finding("ok", "numpy", answer.facts["version"])
    return Finding("missing", "numpy", answer.error, "pip install numpy")


def _torch(machine: Machine) -> Finding:
    answer = machine.answers["torch"]
    if answer.works:
        device = "with a CUDA device" if answer.facts["cuda"] else "CPU"
        return Finding("ok", "torch", f"{answer.facts['version']}, {device}")
    return Finding("missing", "torch", answer.error, f"pip install torch, then {_REBUILD}")


def _tensorflow(machine: Machine) -> Finding:
    answer = machine.answers["tensorflow"]
    if answer.works:
        return Finding("ok", "tensorflow", answer.facts["version"])
    return Finding(
        "warn",
        "tensorflow",
        answer.error,
        f"only for TensorFlow: pip install tensorflow-cpu, then {_REBUILD}",
    )


def _horovod(machine: Machine) -> Finding:
    if machine.horovod is None:
        return Finding("missing", "horovod", "not installed", _REBUILD)
    if machine.horovod.split("+")[0] != HOROVOD_VERSION:
        return Finding("warn", "horovod", f"{machine.horovod}; {HOROVOD_VERSION} is tested", _REBUILD)
    return Finding("ok", "horovod", machine.horovod)


def _horovod_torch(machine: Machine) -> Finding:
    answer = machine.answers["horovod_torch"]
    if answer.works:
        return Finding("ok", "horovod for torch", "compiled")
    return Finding("missing", "horovod for torch", answer.error, _REBUILD)


def _horovod_tensorflow(machine: Machine) -> Finding:
    answer = machine.answers["horovod_tensorflow"]
    if answer.works:
        return Finding("ok", "horovod for tf", "compiled")
    return Finding("warn", "horovod for tf", answer.error, f"only for TensorFlow: {_REBUILD}")


def _controllers(machine: Machine) -> Finding:
    answer = machine.answers["horovod_torch"]
    if not answer.works:
        return Finding("missing", "controllers", "unknown", "settle horovod for torch first")
    found = answer.facts["controllers"]
    if not found:
        return Finding("missing", "controllers", "neither MPI nor Gloo", f"install libopenmpi-dev, then {_REBUILD}")
    if "MPI" not in found:
        return Finding(
            "warn", "controllers", "Gloo, without MPI", f"for mpirun, install libopenmpi-dev, then {_REBUILD}"
        )
    return Finding("ok", "controllers", ", ".join(found))


def _gpu_operations(machine: Machine) -> Finding:
    answer = machine.answers["horovod_torch"]
    if not answer.works:
        return Finding("warn", "GPU operations", "unknown", "settle horovod for torch first")
    if answer.facts["nccl"]:
        return Finding("ok", "GPU operations", "NCCL")
    if machine.answers["torch"].facts.get("cuda"):
        return Finding("warn", "GPU operations", "none, but there is a CUDA device", f"HOROVOD_GPU=1: {_REBUILD}")
    return Finding("ok", "GPU operations", "none, and no CUDA device")


def _mpirun(machine: Machine) -> Finding:
    line = machine.programs["mpirun"]
    if line is not None:
        return Finding("ok", "mpirun", line)
    return Finding("warn", "mpirun", "not found or not working", "install openmpi-bin, or start with horovodrun --gloo")


def _horovodrun(machine: Machine) -> Finding:
    line = machine.programs["horovodrun"]
    if line is not None:
        return Finding("ok", "horovodrun", line)
    return Finding("warn", "horovodrun", "not found or not working", f"{_REBUILD}, or start with mpirun")


def _mpi4py(machine: Machine) -> Finding:
    answer = machine.answers["mpi4py"]
    if answer.works:
        return Finding("ok", "mpi4py", f"{answer.facts['version']}, {answer.facts['library']}")
    return Finding("warn", "mpi4py", answer.error, "only for NumPy arrays over MPI: pip install 'mpi4py>=4'")


def _seam(machine: Machine) -> Finding:
    answer = machine.answers["seam"]
    if answer.works:
        return Finding("ok", "seam", "horovod_sparse.torch extends the installed Horovod")
    return Finding(
        "missing", "seam", answer.error, f"settle the lines above first; this needs Horovod {HOROVOD_VERSION}"
    )


def _tensorflow_seam(machine: Machine) -> Finding:
    answer = machine.answers["tensorflow_seam"]
    if answer.works:
        return Finding("ok", "seam for tf", "horovod_sparse.tensorflow extends the installed Horovod")
    return Finding(
        "warn",
        "seam for tf",
        answer.error,
        f"only for TensorFlow: settle its lines above; needs Horovod {HOROVOD_VERSION}",
    )


def _kernels(_: Machine) -> Finding:
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
    return Finding("ok", "kernels", f"{variant}; {sets}")


_CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    _python,
    _numpy,
    _torch,
    _tensorflow,
    _horovod,
    _horovod_torch,
    _horovod_tensorflow,
    _controllers,
    _gpu_operations,
    _mpirun,
    _horovodrun,
    _mpi4py,
    _seam,
    _tensorflow_seam,
    _kernels,
)


def judge(machine: Machine) -> list[Finding]:
    """Return one finding for each thing that training needs or can use. Training with torch can run if none is ``missing``."""
    return [check(machine) for check in _CHECKS]
