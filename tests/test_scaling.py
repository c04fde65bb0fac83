"""The benchmark of scaling: its table and picture, from given steps, and its names, which are those of `step_time.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `benchmarks/scaling.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scaling

    return scaling


def test_the_part_that_is_computation(scaling: Any, tmp_path: Path) -> None:
    rows = [scaling.ALONE, "dense fp32", *scaling.ROWS]
    steps = {name: {2: (9.0, 10.0, 11.0), 4: (18.0, 20.0, 22.0)} for name in rows}
    steps["dense fp32"][4] = (70.0, 80.0, 90.0)
    lines = scaling.table(steps, [2, 4]).splitlines()
    assert lines[3] == "| dense fp32 | 10.0 (9.0–11.0) | 80.0 (70.0–90.0) | 100% | 25% |"
    assert len({line.count("|") for line in lines}) == 1
    scaling.draw(steps, [2, 4], "1gbit", tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 1000
