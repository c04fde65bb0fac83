"""Checkpoints of jobs that are killed, and that go on with another number of workers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from .killed import FIRST
from .launch import Ended, Launch
from .scenario import MPI_2, MPI_4

pytestmark = [pytest.mark.parallel, pytest.mark.full]

LIMIT = 300.0
"""Seconds; an idle machine needs a tenth."""
KILLS = 3


def _found(pattern: str, ended: Ended) -> list[str]:
    return sorted(set(re.findall(pattern, ended.output)))


def _train(launch: Launch, folder: Path, *arguments: object, ends: bool = True) -> Ended:
    environment = {"HOROVOD_SPARSE_FORCE": "1"}
    ended = launch.run("-m", "parallel.killed", str(folder), *map(str, arguments), limit=LIMIT, environment=environment)
    assert ended.code is not None and (ended.code == 0) == ends, str(ended)
    return ended


def test_a_job_that_is_killed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """At random moments. A rank that is killed at each moment of a save is in `test_checkpoint`."""
    # More than the kills let pass.
    steps = (KILLS + 2) * (FIRST + 2)
    whole = _train(MPI_2, tmp_path / "whole", steps)
    ends = _found(r"rank \d ended with [0-9a-f]{64}", whole)
    assert len(ends) == 2

    starts = []
    for seed in range(KILLS):
        killed = _train(MPI_2, tmp_path / "killed", steps, seed, ends=False)
        (start,) = _found(r"begins at step (\d+)", killed)
        starts.append(int(start))
    last = _train(MPI_2, tmp_path / "killed", steps)
    (start,) = _found(r"begins at step (\d+)", last)
    assert starts == sorted(starts) and 0 < int(start) < steps, [*starts, start]
    assert _found(r"rank \d ended with [0-9a-f]{64}", last) == ends


def test_another_number_of_workers_keeps_the_sum_of_the_residuals(tmp_path: Path) -> None:
    saved = _train(MPI_2, tmp_path / "saved", 9)
    # The last checkpoint is that of step 8.
    kept = dict(re.findall(r"saved (\S+) (.*)", saved.output))
    for launch in (Launch("mpirun", 1), MPI_4):
        folder = shutil.copytree(tmp_path / "saved", tmp_path / str(launch))
        other = _train(launch, folder, 9)
        assert f"2 workers saved the checkpoint of step 8, {launch.ranks} continue" in other.output
        loaded = dict(re.findall(r"loaded (\S+) (.*)", other.output))
        assert kept.keys() == loaded.keys() and len(kept) > 10
        for name, sums in kept.items():
            expected, got = ([float(one) for one in text.split()] for text in (sums, loaded[name]))
            assert got == pytest.approx(expected, abs=1e-4), name
