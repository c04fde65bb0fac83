"""Accelerate's own scripts of tests, each started by torchrun on 2 ranks, as tests for pytest."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import pytest

SCRIPTS = ("test_sync", "test_script", "test_ddp_comm_hook")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "suites.accelerate_scripts")


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str) -> None:
    # Else Accelerate takes each rank for the only one where there is no GPU.
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *_TORCHRUN, name]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]


if __name__ == "__main__":
    from suites import ddp_models, outcomes

    if outcomes.ours():
        ddp_models.put_in()
    runpy.run_module(f"accelerate.test_utils.scripts.{sys.argv[1]}", run_name="__main__")
