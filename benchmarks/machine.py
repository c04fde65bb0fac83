"""The properties of this machine that timings depend on, and how options are read. Imports no framework."""

from __future__ import annotations

import argparse
import os
import platform

from horovod_sparse import kernels
from horovod_sparse.tools.check import cpu_info, instruction_sets


def describe() -> str:
    """The processor, its instruction sets, its cores, the variant of the kernels that is used, and whether it asks ahead."""
    sets = ", ".join(instruction_sets()) or "instruction sets unknown"
    processor = cpu_info("model name") or platform.processor() or platform.machine()
    asks = ", asking ahead" if kernels.available() and kernels.asks_ahead() else ""
    return f"{processor} ({sets}), {os.cpu_count()} cores, kernels: {kernels.variant()}{asks}"


def parser(text: str | None) -> argparse.ArgumentParser:
    """Described by the first line of a script's docstring; its help has the defaults of all options."""
    described = (text or "").partition("\n")[0]
    return argparse.ArgumentParser(description=described, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
