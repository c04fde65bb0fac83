"""What the launches of `parallel/` start from."""

from __future__ import annotations

import os
import subprocess

import pytest
from parallel.launch import clean_environment, launcher_variables


def test_variables_are_seen_that_only_a_child_would_see() -> None:
    name = "OMPI_COMM_WORLD_SIZE"
    before = launcher_variables()
    # As MPI does when it is initialised.
    os.putenv(name, "1")
    try:
        assert name not in os.environ
        assert f"{name}=1" in subprocess.run(["env"], capture_output=True, text=True, check=True).stdout.splitlines()
        assert launcher_variables() == before | {name}
    finally:
        os.unsetenv(name)
    assert launcher_variables() == before


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PRTE_X", "HOROVOD_RANK"])
def test_a_launch_starts_without_variables_of_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert name not in clean_environment()
    assert "PATH" in clean_environment()
