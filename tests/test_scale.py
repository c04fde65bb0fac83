"""The pages on a thousand workers and on far networks have the tables of the raw data."""

from __future__ import annotations

import pytest
from process import ROOT, python


@pytest.mark.parametrize(("study", "page", "tables"), [("many_workers", "scale", 6), ("networks", "networks", 6)])
def test_the_page_has_the_tables_of_the_raw_data(study: str, page: str, tables: int) -> None:
    script = ROOT / "studies" / f"{study}.py"
    done = python(script, "tables", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    text = (ROOT / "docs" / "evidence" / f"{page}.md").read_text(encoding="utf-8")
    assert done.stdout.count(":\n\n| ") == tables
    assert done.stdout.strip() in text, f"put into the page: python {script} tables"
