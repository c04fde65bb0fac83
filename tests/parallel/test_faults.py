"""A rank that raises, exits or is killed ends the job on all ranks, soon, and the log tells why."""

from __future__ import annotations

import pytest

from tests.harness.launch import Launch

from .injected import FAULTS, LAUNCHES, Fault, run
from .scenario import MPI_2

pytestmark = pytest.mark.parallel

SOON = 30.0
"""Seconds from the fault to the end of the launch."""

QUICK = (Fault("synchronize", "kill"), MPI_2)
"""The others are in a collective that the killed rank never joins."""

EVERY = [(fault, LAUNCHES[fault.framework][number // 2 % 2]) for number, fault in enumerate(FAULTS)]
EVERY = [one for number, one in enumerate(EVERY) if number % 8 in (1, 2, 5, 7)]
"""Each moment, and each way to end. `benchmarks/faults.py` starts every fault with both launchers."""


@pytest.mark.parametrize(
    ("fault", "launch"), [pytest.param(*one, marks=[] if one == QUICK else pytest.mark.full) for one in EVERY], ids=str
)
def test_a_fault_ends_the_job(fault: Fault, launch: Launch) -> None:
    outcome = run(launch, fault)
    assert outcome.ended.code not in (None, 0), str(outcome.ended)
    assert "trained to the end" not in outcome.ended.output, str(outcome.ended)
    assert outcome.seconds is not None and outcome.seconds < SOON, f"{outcome.seconds} s; {outcome.ended}"
    assert outcome.says(fault), str(outcome.ended)
