"""The properties of this machine that timings depend on. Imports no framework."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from horovod_sparse import kernels

_CPUINFO = Path("/proc/cpuinfo")
_SETS = ("sse4_2", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "asimd", "sve", "sve2")
"""The instruction sets that tell a processor's generation."""


def processor() -> str:
    """Return the name that the processor reports."""
    return _line("model name") or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """Return the names in `_SETS` that this processor has."""
    # AArch64 lists them under "Features".
    flags = (_line("flags") or _line("Features")).split()
    return [name for name in _SETS if name in flags]


def describe() -> str:
    """Describe the processor, its instruction sets, its cores, and the variant of the kernels that is used."""
    sets = ", ".join(instruction_sets()) or "instruction sets unknown"
    return f"{processor()} ({sets}), {os.cpu_count()} cores, kernels: {kernels.variant()}"


def _line(name: str) -> str:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")
