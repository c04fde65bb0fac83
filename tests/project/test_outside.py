"""What `ci/outside.py` makes of the outcomes of suites, on invented ones: it must see what passes dense only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.harness.process import ROOT

NAME = "a suite"
KEPT, LOST, BROKEN, HALF, SKIPPED = (f"file::{one}" for one in ("kept", "lost", "broken", "half", "skipped"))
DENSE = {KEPT: "passed", LOST: "passed", BROKEN: "failed", HALF: "passed", SKIPPED: "passed"}
OURS = {**DENSE, LOST: "failed", SKIPPED: "skipped"}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    return import_module("outside")


def written(folder: Path, ranks: list[dict[str, str]]) -> Path:
    folder.mkdir()
    for rank, outcomes in enumerate(ranks):
        lines = [json.dumps({"test": f"a/{test}", "outcome": one, "message": one}) for test, one in outcomes.items()]
        # pytest names the file.
        text = "\n".join(lines).replace("file::", "file.py::")
        (folder / f"outcomes-{rank}.jsonl").write_text(text, encoding="utf-8")
    (folder / "used-0.jsonl").write_text(json.dumps({"test": "a/file.py::kept"}), encoding="utf-8")
    return folder


@pytest.fixture
def results(outside: Any, tmp_path: Path) -> Any:
    short = {test: one for test, one in OURS.items() if test != HALF}
    return {
        outside.DENSE: outside.read(written(tmp_path / "dense", [DENSE, DENSE])),
        # The second rank has not ended a test.
        outside.OURS: outside.read(written(tmp_path / "ours", [OURS, short])),
    }


def test_a_test_passes_where_it_passes_on_all_ranks(outside: Any, results: Any) -> None:
    assert results[outside.DENSE].of("passed") == {KEPT, LOST, HALF, SKIPPED}
    assert results[outside.OURS].of("passed") == {KEPT}
    assert results[outside.OURS].of("failed") == {LOST, BROKEN, HALF}
    assert results[outside.OURS].used == {KEPT}


def test_a_difference_needs_a_reason(outside: Any, results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(outside.REASONS, NAME, {LOST: "right"})
    lost, wrong = outside.differences(NAME, results)
    assert [test for test, _ in lost] == [HALF, LOST, SKIPPED]
    assert [LOST in one for one in wrong] == [False, False]
    assert HALF in wrong[0] and "not ended on all ranks" in wrong[0] and SKIPPED in wrong[1]


@pytest.mark.parametrize("test", [KEPT, BROKEN])
def test_a_reason_needs_a_difference(outside: Any, results: Any, test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = dict.fromkeys((LOST, HALF, SKIPPED, test), "right")
    monkeypatch.setitem(outside.REASONS, NAME, reasons)
    assert [test in one for one in outside.differences(NAME, results)[1]] == [True]


def test_every_suite_with_reasons_is_run(outside: Any) -> None:
    assert set(outside.REASONS) <= set(outside.SUITES)


@pytest.mark.parametrize("there", [False, True])
def test_a_suite_of_a_repository_needs_its_tests(outside: Any, tmp_path: Path, there: bool) -> None:
    suite = outside.Suite("torch", outside.PYTORCH, ("tests/*.py",))
    file = tmp_path / "tests" / "test_one.py"
    file.parent.mkdir()
    if there:
        file.touch()
        assert suite.files({outside.PYTORCH: tmp_path}) == [str(file.resolve())]
        return
    for given in ({}, {outside.PYTORCH: tmp_path}, {outside.HOROVOD: tmp_path}):
        with pytest.raises(SystemExit, match=r"--pytorch must be a copy of the repository, .*git clone"):
            suite.files(given)


def test_a_run_ends_without_an_error_also_if_a_test_fails(tmp_path: Path) -> None:
    """mpirun ends all ranks as soon as one has ended with an error, and their tests would count as not ended."""
    file = tmp_path / "test_one.py"
    file.write_text("def test_fails():\n    raise ValueError\n", encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "ci"),
        "OUTSIDE_FOLDER": str(tmp_path),
        "OUTSIDE_EXCHANGE": "dense",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "-p",
        "suites.outcomes",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, file.name], cwd=tmp_path, env=environment, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(line)["outcome"] for line in (tmp_path / "outcomes-0.jsonl").read_text().splitlines()] == [
        "failed"
    ]
