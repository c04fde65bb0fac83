"""The pages on a thousand workers and on far networks, and what others quote of them, are those of the raw data."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.harness.process import ROOT, python


@pytest.mark.parametrize(
    ("study", "page", "tables"), [("many_workers", "scale", 6), ("networks", "networks", 6), ("real", "tasks", 3)]
)
def test_the_page_has_the_tables_of_the_raw_data(study: str, page: str, tables: int) -> None:
    script = ROOT / "studies" / f"{study}.py"
    done = python(script, "tables", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    text = (ROOT / "docs" / "evidence" / f"{page}.md").read_text(encoding="utf-8")
    assert done.stdout.count(":\n\n| ") >= tables
    assert done.stdout.strip() in text, f"put into the page: python {script} tables"


ROWS = {
    "fp32": "DDP fp32",
    "fp16": "DDP fp16",
    "power": "DDP PowerSGD rank 4",
    "diloco": "DiLoCo, every 15",
    "local": "LocalUpdates, TopK(0.03), packed, every 15",
    "sidco": "SIDCo(0.01)",
}
SECONDS = [
    ("README", "transformer", 2, "reaches a loss in {local} s, DiLoCo in {diloco} s, DDP's float16 in {fp16} s"),
    ("docs/decide", "transformer", 0, "fp32 {fp32}, every step {sidco}, fp16 {fp16}; `LocalUpdates` {local}"),
    ("docs/decide", "transformer", 1, "{local} and {sidco}; DiLoCo {diloco}, PowerSGD {power}, fp16 {fp16}"),
    ("docs/decide", "transformer", 2, "{local}; DiLoCo {diloco}, every step {sidco}, fp16 {fp16}"),
    ("docs/decide", "transformer", 4, "{local}; DiLoCo {diloco}, every step {sidco}, PowerSGD {power}"),
    ("docs/decide", "transformer, 4 hosts", 0, "{fp16} and {sidco}; fp32 {fp32}, PowerSGD {power}"),
    ("docs/decide", "transformer, 4 hosts", 1, "{fp16}; every step {sidco}, fp32 {fp32}, PowerSGD {power}"),
]
"""What pages say of a suite in one of its networks."""


@pytest.mark.parametrize(("page", "name", "place", "sentence"), SECONDS)
def test_seconds_to_a_loss_are_those_of_the_raw_data(
    page: str, name: str, place: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "studies"))
    networks = import_module("networks")
    suite = networks.SUITES[name]
    seconds = {
        key: networks.written(networks.seconds(name, row, suite.networks[place]))
        for key, row in ROWS.items()
        if row in suite.rows and networks.known(suite=name, row=row)
    }
    text = " ".join((ROOT / f"{page}.md").read_text(encoding="utf-8").split())
    assert sentence.format(**seconds) in text
