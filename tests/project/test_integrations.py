"""The scripts that `ci/integrations.py` takes from the pages, of which running all takes long, are there to be found."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from tests.harness.process import ROOT


@pytest.fixture
def integrations(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    return import_module("integrations")


def test_each_mark_tells_one_block_of_its_page_and_parts_fit(integrations: Any) -> None:
    for parts in integrations.SCRIPTS.values():
        compile(integrations.script(parts), "train.py", "exec")


def test_scripts_of_local_updates_have_what_is_changed(integrations: Any) -> None:
    names = [name for name in integrations.SCRIPTS if name.endswith(integrations.LOCAL)]
    assert names
    for name in names:
        text = integrations.script(integrations.SCRIPTS[name])
        assert all(change(text) != text for change in integrations.VARIANTS.values()), name
        assert all(old in text for old, _, _ in integrations.REFUSED.get(name, ())), name
