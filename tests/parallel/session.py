"""Run many scenarios with few launches, and say of each what came of it on every rank. Imports no framework."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.launch import Ended, Launch

LAUNCH_LIMIT = 1800.0
"""Seconds for all scenarios of a launch; a single one that hangs is ended much sooner, by its worker."""


@dataclass
class Outcome:
    """Of one scenario: which ranks ended it, and what they raised."""

    seconds: float = 0.0
    ended: set[int] = field(default_factory=set)
    errors: dict[int, str] = field(default_factory=dict)
    launch: str = ""
    """How the launch ended, if that was during this scenario."""

    @property
    def passed(self) -> bool:
        return not self.errors and not self.launch

    def __str__(self) -> str:
        raised = "\n".join(f"--- rank {rank} raised ---\n{error}" for rank, error in sorted(self.errors.items()))
        return "\n".join(part for part in (raised, self.launch) if part)


def run_scenarios(launch: Launch, names: Sequence[str], directory: Path) -> dict[str, Outcome]:
    """Outcomes by name. After a launch that broke off, the scenarios that are left get another."""
    outcomes: dict[str, Outcome] = {}
    left = list(names)
    while left:
        part = directory / str(len(outcomes))
        part.mkdir(parents=True)
        chosen = part / "names.json"
        chosen.write_text(json.dumps(left), encoding="utf-8")
        ended = launch.run("-m", "tests.parallel.worker", launch.framework, str(part), str(chosen), limit=LAUNCH_LIMIT)
        reached = _read(part, launch.ranks)
        if ended.code != 0:
            _blame(reached, left, launch.ranks, ended)
        outcomes |= reached
        left = [name for name in left if name not in outcomes]
    return outcomes


def _read(directory: Path, ranks: int) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for rank in range(ranks):
        path = directory / f"rank{rank}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in map(json.loads, lines):
            outcome = outcomes.setdefault(line["scenario"], Outcome())
            if line["event"] == "end":
                outcome.ended.add(rank)
                outcome.seconds = max(outcome.seconds, line["seconds"])
                if line["error"]:
                    outcome.errors[rank] = line["error"]
    return outcomes


def _blame(reached: dict[str, Outcome], names: Sequence[str], ranks: int, ended: Ended) -> None:
    """A launch that broke off did so in the first scenario that a rank did not end, or in the last one."""
    unfinished = [name for name in reached if len(reached[name].ended) < ranks]
    culprit = unfinished[0] if unfinished else list(reached)[-1] if reached else names[0]
    reached.setdefault(culprit, Outcome()).launch = str(ended)
    for name in unfinished[1:]:
        del reached[name]
