"""The pages on a thousand workers and on far networks have the tables of the raw data, and their hosts the right workers."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

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


def test_each_suite_has_its_workers_on_its_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row runs on all hosts and workers of the suite, and is written down once."""
    monkeypatch.syspath_prepend(str(ROOT / "studies"))
    networks = import_module("networks")
    epoch = {"step": 1, "seconds": 1.0, "bytes_per_step": 1.0, "bits_per_character": 1.0, "held_out_loss": 1.0}
    log = "\n".join(json.dumps(line) for line in ({"event": "epoch", "epoch": 1, **epoch}, {"event": "end"}))
    started: list[tuple[int, int]] = []

    def run(where: Any, launcher: str, slots: int, command: list[str], *, rings: bool) -> int:
        started.append((len(where.hosts), slots))
        Path(command[-1]).write_text(log, encoding="utf-8")
        return 0

    def cluster(number: int, network: Any) -> Any:
        return nullcontext(networks.hosts.Cluster(("host",) * number, tmp_path, ""))

    monkeypatch.setattr(networks.hosts, "cluster", cluster)
    monkeypatch.setattr(networks.hosts, "run", run)
    monkeypatch.setattr(networks.loss_runs.runs.demo, "worker_environment", dict)
    monkeypatch.setattr(networks, "DATA", tmp_path / "networks.jsonl")
    expected = {
        "transformer": (2, 1),
        "CNN": (2, 1),
        "transformer, 4 hosts": (4, 1),
        "CNN, 4 hosts": (4, 1),
        "HSDP": (2, 2),
    }
    assert networks.SUITES.keys() == expected.keys()
    for name, suite in networks.SUITES.items():
        started.clear()
        networks.link(Namespace(output=tmp_path, timeout=1.0), name, replace(suite, networks=suite.networks[:1]))
        assert started == [expected[name]] * len(suite.rows), name
        assert [raw["row"] for raw in networks.known(suite=name)] == [*suite.rows], name
