"""What runs the commands of the pages."""

from __future__ import annotations

import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.harness.process import ROOT


def test_commands_share_a_shell_and_end_with_the_first_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that hangs is stopped, with what it has started."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    quickstart: Any = import_module("quickstart")
    for name in ("clone", "home"):
        (tmp_path / name).mkdir()
    place = quickstart.Place(tmp_path, None, {"PATH": os.environ["PATH"]})

    def outcomes(*texts: str) -> list[str]:
        todo = [
            quickstart.Command("page.md", number, text, not text.startswith("#")) for number, text in enumerate(texts)
        ]
        return [result.outcome for result in quickstart.run(todo, place, ["left out"], 2.0)]

    assert outcomes("cd ../home", "# false", "echo left out; false", "touch here") == [
        "ok",
        "not run here",
        "skipped",
        "ok",
    ]
    assert (tmp_path / "home" / "here").exists()
    assert outcomes("test -e here", "true") == ["failed", "not reached"]
    began = time.monotonic()
    assert outcomes("true", "(sleep 6; touch late) & sleep 60", "true") == ["ok", "failed", "not reached"]
    assert time.monotonic() - began < 20
    time.sleep(6)
    assert not (tmp_path / "clone" / "late").exists()
