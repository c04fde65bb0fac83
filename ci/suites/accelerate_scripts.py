"""Accelerate's own scripts of tests, each started by torchrun on 2 ranks, as tests for pytest."""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

SCRIPTS = ("test_sync", "test_script", "test_ddp_comm_hook", "test_distributed_data_loop")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "suites.accelerate_scripts")


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str) -> None:
    # Else Accelerate takes each rank for the only one where there is no GPU.
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *_TORCHRUN, name]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]


def _join_on_cpus() -> None:
    """Let `join_uneven_inputs` join on CPUs, too. There it does nothing else, and the rank with more data waits for ever."""
    # Only the environment of the suites has it.
    accelerator: Any = import_module("accelerate").Accelerator
    kinds: Any = import_module("accelerate.utils").DistributedType
    joined = accelerator.join_uneven_inputs

    @contextlib.contextmanager
    def join(self: Any, *given: Any, **named: Any) -> Iterator[None]:
        before = self.state.distributed_type
        if before == kinds.MULTI_CPU:
            self.state.distributed_type = kinds.MULTI_GPU
        try:
            with joined(self, *given, **named):
                yield
        finally:
            self.state.distributed_type = before

    accelerator.join_uneven_inputs = join


if __name__ == "__main__":
    from suites import ddp_models, outcomes

    ddp_models.leave_out_devices()
    _join_on_cpus()
    if outcomes.ours():
        ddp_models.put_in()
    runpy.run_module(f"accelerate.test_utils.scripts.{sys.argv[1]}", run_name="__main__")
