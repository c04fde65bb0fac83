"""The pages on a thousand workers and on far networks, and what others quote of them, are those of the raw data."""

from __future__ import annotations

from importlib import import_module

import pytest
from process import ROOT, python


@pytest.mark.parametrize(("study", "page"), [("many_workers", "scale"), ("networks", "networks")])
def test_the_page_has_the_tables_of_the_raw_data(study: str, page: str) -> None:
    script = ROOT / "studies" / f"{study}.py"
    done = python(script, "tables", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    text = (ROOT / "docs" / "evidence" / f"{page}.md").read_text(encoding="utf-8")
    assert done.stdout.count(":\n\n| ") >= 6
    assert done.stdout.strip() in text, f"put into the page: python {script} tables"


ROWS = {
    "fp32": "DDP fp32",
    "fp16": "DDP fp16",
    "power": "DDP PowerSGD rank 4",
    "diloco": "DiLoCo, every 15",
    "local": "LocalUpdates, TopK(0.03), packed, every 15",
    "sidco": "SIDCo(0.01)",
}
FAR = "100mbit, 20 ms, 0 % loss"
SECONDS = [
    ("README.md", FAR, "reaches a loss in {local} s, DiLoCo in {diloco} s, DDP's float16 in {fp16} s"),
    (
        "docs/decide.md",
        "10gbit",
        "fp32 {fp32}, `SIDCo(0.01)` {sidco}, fp16 {fp16}; `LocalUpdates` {local}, DiLoCo {diloco}",
    ),
    ("docs/decide.md", "1gbit", "{local} and {sidco}; DiLoCo {diloco}, PowerSGD {power}, fp16 {fp16}"),
    ("docs/decide.md", FAR, "{local}; DiLoCo {diloco}, `SIDCo(0.01)` {sidco}, fp16 {fp16}, PowerSGD {power}"),
    (
        "docs/decide.md",
        "10mbit, 20 ms, 0 % loss",
        "{local}; DiLoCo {diloco}, `SIDCo(0.01)` {sidco}, PowerSGD {power}, fp16 {fp16}",
    ),
]


@pytest.mark.parametrize(("page", "network", "sentence"), SECONDS)
def test_seconds_to_a_loss_are_those_of_the_raw_data(
    page: str, network: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "studies"))
    networks = import_module("networks")
    there = {str(one): one for one in networks.NETWORKS}[network]
    measured = {name: networks.seconds("transformer", row, there) for name, row in ROWS.items()}
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert sentence.format(**{name: networks.written(one) for name, one in measured.items()}) in text
