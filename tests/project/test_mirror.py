"""Each module of the package has a test file of its name, or its docstring says which file tests it.

`ci/mutation.py` finds a module's tests by this rule.
"""

from __future__ import annotations

import ast
import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

from tests.harness.process import ROOT

PACKAGE = ROOT / "horovod_sparse"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=attrgetter("stem"))
def test_a_module_leads_to_its_tests(path: Path) -> None:
    own = ROOT / "tests" / path.relative_to(PACKAGE).with_name(f"test_{path.name}")
    said = re.search(r"Tested by (tests/[^ ]*\.py)", ast.get_docstring(ast.parse(path.read_text())) or "")
    if own.exists():
        assert said is None, f"{path} names another file than {own}; leave the sentence out"
    else:
        assert said, f"add {own}, or end the docstring of {path} with: Tested by tests/....py."
        assert (ROOT / said[1]).exists(), f"{path} names {said[1]}, which is not there"


def test_mutants_are_given_to_tests_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    mutation = import_module("mutation")
    tests = {test for module in mutation.MODULES for test in mutation.tests_of(module)}
    assert [test for test in sorted(tests) if not (ROOT / test).exists()] == []
