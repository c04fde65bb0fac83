"""The command `horovod-sparse report`, on logs of real runs with NumPy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stairs import Halving
from test_stats_log import reduction, train

from horovod_sparse.numpy import SparseAllreduce, StatsLog, TopK
from horovod_sparse.tools import cli
from horovod_sparse.tools.report import TITLES, Log, short


def write_log(path: Path, compression: Any = None, steps: int = 12, **arguments: Any) -> Path:
    reduce = reduction() if compression is None else SparseAllreduce(None, compression)
    train(reduce, StatsLog(reduce, path, every=2, **arguments), steps)
    return path


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[list[str]]:
    """The cells of the table that the command prints."""
    assert cli.main(["report", *map(str, arguments)]) == 0
    return [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]


def test_the_table_says_what_was_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_log(tmp_path / "stats.jsonl", TopK(0.1, warmup=None))
    titles, row = report(capsys, path)
    assert tuple(titles) == TITLES
    assert row[:4] == [str(path), "TopK 0.1", "12", "0.10000"]
    assert float(row[5]) > 0.0


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Path]:
    """Writes a log of given numbers. A tuple is a step; a number alone begins a run after that step."""

    def make(*lines: Any, name: str = "made.jsonl", compressor: str = "SIDCo(a=1, ratio=0.1, z=2)") -> Path:
        written = []
        for line in lines:
            if isinstance(line, int):
                written.append({"format": 1, "package": "0", "compressor": compressor, "step": line})
            else:
                step, seconds, count, sent, dense = line
                numbers: dict[str, Any] = dict.fromkeys(("target", "stages", "truncated", "residual_norm"), 1.0)
                numbers |= {"seconds": seconds, "numel": 1e3, "count": count, "ratio": count / 1e3, "threshold": None}
                written.append({"step": step, **numbers, "bytes_sent": sent, "dense_bytes_sent": dense, "exchange": ""})
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in written))
        return path

    return make


def test_a_line_stands_for_the_steps_since_the_line_before(made: Callable[..., Path]) -> None:
    log = Log(made(4, (5, None, 100.0, 800.0, 40.0), (10, 0.25, 300.0, 2400.0, 40.0), (11, 0.75, 0.0, 0.0, 40.0)))
    assert log.weights == [1, 5, 1]
    sent = 800 + 5 * 2400 + 7 * 40
    assert log.row()[1:] == ("SIDCo 0.1", "11", f"{(100 + 5 * 300) / 7000:.5f}", f"{sent:,}", "500.0")
    assert Log(made(0, (1, None, 1.0, 1.0, 1.0))).row()[-1] == "nan"


def test_steps_that_are_made_again_replace_those_of_before(made: Callable[..., Path]) -> None:
    steps = [(step, 0.1, 100.0, 8.0, 0.0) for step in (10, 20, 30)]
    log = Log(made(0, *steps, 20, (30, 0.1, 500.0, 0.0, 0.0), 5, (15, 0.1, 700.0, 0.0, 0.0)))
    assert log.column("step") == [15.0] and log.weights == [10]
    log = Log(made(0, *steps, 20, (25, 0.1, 500.0, 0.0, 0.0)))
    assert log.column("count") == [100.0, 100.0, 500.0] and log.weights == [10, 10, 5]


@pytest.mark.parametrize(
    ("compressor", "name"),
    [
        (TopK(0.25), "TopK 0.25"),
        (SparseAllreduce(None, TopK(0.25)), "TopK 0.25"),
        (TopK(Halving(0.25, 0.01, 20)), "TopK Halving(highest=0.25, final=0.01, every=20)"),
        ("Own(sample_ratio=0.1)", "Own"),
    ],
    ids=str,
)
def test_a_compressor_is_told_by_name_and_ratio(compressor: Any, name: str) -> None:
    assert short(compressor if isinstance(compressor, str) else repr(compressor)) == name


def test_an_incomplete_last_line_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_log(tmp_path / "stats.jsonl")
    content = path.read_bytes()
    path.write_bytes(content[:-30])
    assert report(capsys, path)[1][2] == "10"
    assert path.read_bytes() == content[:-30]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "logs must be files of StatsLog: .*No such file"),
        ("a shopping list\n", "logs must be files of StatsLog: line 1 must be one of a StatsLog"),
        ('{"format": 1, "compressor": "TopK()", "step": 0}\n', "have no steps yet"),
    ],
)
def test_what_is_no_log_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=message):
        cli.main(["report", str(path)])


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e400", "Infinity", '"\\u001b[31m"', "[]", "{}"])
@pytest.mark.parametrize("name", ["step", "seconds", "numel", "count", "bytes_sent", "dense_bytes_sent"])
def test_what_is_no_number_is_refused(name: str, number: str, tmp_path: Path) -> None:
    path = write_log(tmp_path / "stats.jsonl")
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, re.sub(rf'"{name}": [^,}}]+', lambda _: f'"{name}": {number}', last), ""]))
    with pytest.raises(SystemExit, match=r"^logs must be files of StatsLog: [^\x1b]*$"):
        cli.main(["report", str(path)])


def test_numbers_of_which_the_sum_is_too_large_are_shown(made: Callable[..., Path], capsys: Any) -> None:
    steps = [(number, 0.1, 1e308, 1e308, 0.0) for number in (1, 2, 3)]
    assert report(capsys, made(0, *steps))[1][4] == "inf"


def test_no_control_character_reaches_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_log(tmp_path / "stats.jsonl")
    path.write_text(path.read_text().replace("SIDCo", "\\u001b[31m\\u0007"))
    cli.main(["report", str(path)])
    assert "?[31m?" in capsys.readouterr().out.splitlines()[1]
