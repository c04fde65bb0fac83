"""What every framework needs of stock Horovod. Imports no framework. Tested by tests/torch/test_seam.py."""

from __future__ import annotations

from typing import Any

HOROVOD = "0.28.1"
"""The last release of Horovod, of June 2023. Its methods are extended in place."""


def check_release(installed: str) -> None:
    """Raise ImportError unless `installed`, a version of Horovod, is this release or a build of it (`0.28.1+...`)."""
    if installed.partition("+")[0] != HOROVOD:
        raise ImportError(
            f"Horovod must be {HOROVOD}, whose methods horovod_sparse extends, got {installed}; install horovod=={HOROVOD} "
            "(tools/build_horovod.sh builds it)"
        )


def complete_global_set(process_sets: Any, mpi_ops: Any) -> None:
    """Give the set of all processes its ranks, if `init` could not: it asks the framework that was imported last.

    Otherwise stock Horovod reduces nothing, without a word. `process_sets` is the module `horovod.common.process_sets`, and
    `mpi_ops` that of the framework that trains.
    """
    # The only private names of Horovod's beside those in torch/wrapped.py.
    basics = mpi_ops._basics
    if basics.is_initialized() and not process_sets.global_process_set.ranks:
        process_sets._setup(basics)
        process_sets._init_process_sets([])
