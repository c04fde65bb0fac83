"""Start the ranks with mpirun or horovodrun, wait no longer than a limit, keep what they printed. Imports no framework."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tests.harness.process import ROOT

_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_")
_FOREIGN = (*_LAUNCHERS, "HOROVOD_")
_MOST_PRINTED = 12_000


def clean_environment() -> dict[str, str]:
    """Without what another launcher, or a Horovod that was initialised in this process, left behind: it confuses mpirun."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}


def launcher_variables() -> set[str]:
    """Names of the variables of launchers that a child of this process would inherit.

    MPI sets them from C, where `os.environ` does not see it and a child without an environment of its own does.
    """
    entries: Any = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    names = (entry.split(b"=")[0].decode() for entry in takewhile(bool, entries))
    return {name for name in names if name.startswith(_LAUNCHERS)}


@dataclass(frozen=True)
class Ended:
    """How a launch ended."""

    code: int | None
    """Exit status; None if it had to be killed at the limit."""
    output: str
    """Standard output and error of all ranks."""

    def __str__(self) -> str:
        how = "did not end by itself and was killed" if self.code is None else f"ended with status {self.code}"
        printed = self.output if len(self.output) <= _MOST_PRINTED else "[...]\n" + self.output[-_MOST_PRINTED:]
        return f"the launch {how}; it printed:\n{printed}"


@dataclass(frozen=True)
class Launch:
    """A launcher and a number of ranks; 0 starts one plain process without any launcher."""

    launcher: str
    """"mpirun", "horovodrun", "elastic" (horovodrun with options of its own), "torchrun" or "plain"."""
    ranks: int = 1
    framework: str = "torch"
    """Whose scenarios are run; every process has one framework only, since each brings a Horovod of its own."""

    process_sets: bool = True
    """Whether process sets can be added and removed: Horovod then has one more blocking collective in every cycle, which on
    few cores sometimes makes steps take a second."""

    def __str__(self) -> str:
        other = "" if self.framework == "torch" else f"{self.framework}-"
        sets = "-sets" if self.process_sets and self.framework == "tensorflow" else ""
        return f"{other}{self.launcher}-{self.ranks}{sets}"

    def _command(self, options: Sequence[str]) -> list[str]:
        if self.launcher == "plain":
            return []
        if self.launcher == "elastic":
            return [str(Path(sys.executable).with_name("horovodrun")), "--gloo", *options]
        if self.launcher == "horovodrun":
            return [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", str(self.ranks)]
        if self.launcher == "torchrun":
            torchrun = str(Path(sys.executable).with_name("torchrun"))
            return [torchrun, "--standalone", "--no-python", "--nproc-per-node", str(self.ranks)]
        command = [shutil.which("mpirun") or "mpirun", "-np", str(self.ranks), "--oversubscribe"]
        command += ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        return [*command, "--allow-run-as-root"] if os.geteuid() == 0 else command

    def run(
        self, *arguments: str, limit: float, environment: Mapping[str, str] | None = None, options: Sequence[str] = ()
    ) -> Ended:
        """Run `python arguments...` on every rank, for at most `limit` seconds. `options` are those of an elastic launch."""
        env = clean_environment()
        env |= {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "HOROVOD_CYCLE_TIME": "1",
            "HOROVOD_DYNAMIC_PROCESS_SETS": str(int(self.process_sets)),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
            # A hang says which rank waits for which tensor, and then ends with an error on all ranks.
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
        }
        env |= environment or {}
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                [*self._command(options), sys.executable, *arguments],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = _wait(process, limit)
            output.seek(0)
            return Ended(code, output.read())


def _wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        # The launchers end their ranks, which are in process groups of their own, when they are asked to end.
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return None
    except BaseException:
        process.terminate()
        process.wait(15)
        raise
