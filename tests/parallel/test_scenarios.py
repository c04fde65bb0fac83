"""Every scenario, with every launcher and number of ranks that it is for, is one test."""

from __future__ import annotations

import pytest

from tests.harness.launch import Launch

from .conftest import Outcomes
from .scenario import MODULES, scenarios

pytestmark = pytest.mark.parallel


def _cases() -> list[object]:
    known = {framework: scenarios(framework) for framework in MODULES}
    launches = dict.fromkeys(launch for found in known.values() for one in found.values() for launch in one.launches)
    return [
        pytest.param(launch, name, id=f"{launch}-{name}", marks=[] if one.is_quick(launch) else [pytest.mark.full])
        for launch in launches
        for name, one in known[launch.framework].items()
        if launch in one.launches
    ]


@pytest.mark.parametrize(("launch", "name"), _cases())
def test_scenario(launch: Launch, name: str, outcomes: Outcomes) -> None:
    outcome = outcomes(launch)[name]
    if not outcome.passed:
        pytest.fail(str(outcome), pytrace=False)
    assert outcome.ended == set(range(launch.ranks))
