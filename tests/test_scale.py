"""The page on a thousand workers has the tables of the raw data, whose bytes are those that the exchanges' formulas say."""

from __future__ import annotations

from process import ROOT, python

STUDY = ROOT / "studies" / "many_workers.py"


def test_the_page_has_the_tables_of_the_raw_data() -> None:
    done = python(STUDY, "tables", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "evidence" / "scale.md").read_text(encoding="utf-8")
    assert done.stdout.count("| method |") == 6 and done.stdout in page, f"put into the page: python {STUDY} tables"
