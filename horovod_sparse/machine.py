"""What figures of speed depend on. Imports no framework."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from horovod_sparse import kernels

_CPUINFO = Path("/proc/cpuinfo")
_SETS = ("sse4_2", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "asimd", "sve", "sve2")
"""Of the processor's instruction sets those that tell its generation."""


def processor() -> str:
    """Its name as it says itself."""
    return _line("model name") or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """Those of this processor that matter here."""
    # AArch64 has other words.
    flags = (_line("flags") or _line("Features")).split()
    return [name for name in _SETS if name in flags]


def describe() -> str:
    """Processor, its instruction sets, its cores, and the variant of the kernels that is used."""
    sets = ", ".join(instruction_sets()) or "instruction sets unknown"
    return f"{processor()} ({sets}), {os.cpu_count()} cores, kernels: {kernels.variant()}"


def _line(name: str) -> str:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")
