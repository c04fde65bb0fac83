"""Fixtures of the tests that start several processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.harness.launch import Launch

from .session import Outcome, run_scenarios

Outcomes = Callable[[Launch], dict[str, Outcome]]


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Outcomes of the scenarios that this session tests, by name; all of one launcher and number of ranks run at once."""
    known: dict[Launch, dict[str, Outcome]] = {}

    def of(launch: Launch) -> dict[str, Outcome]:
        if launch not in known:
            parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
            names = [one["name"] for one in parameters if one.get("launch") == launch and "name" in one]
            known[launch] = run_scenarios(launch, names, tmp_path_factory.mktemp(str(launch)))
        return known[launch]

    return of
